"""What the package raises. Messages say object, action and remedy."""

from __future__ import annotations

import sys
from typing import List, Optional


class Error(RuntimeError):
    """An error of the daemon or the client library; `code` is stable (`UNAVAILABLE`, ...)."""

    def __init__(self, message: str, code: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.code = code


class Regrouped(Error):
    """The step that was computed is to be computed again, from its batch on.

    Another rank died, or the daemon was restarted, before the step was committed, and this rank no
    longer had the gradients that it had handed over (stages 2 and 3 give them up early). Weights
    and everything that was attached with `Optimizer.attach_state` are those of the last
    committed step when this is raised: go on with step `next_step`.
    """

    def __init__(self, message: str, next_step: int, blob: bytes = b"") -> None:
        super().__init__(message, "ABORTED")
        self.next_step = next_step
        self.blob = blob


class ParameterChanged(Error):
    """A parameter was changed in place between two steps, not by the optimizer."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, "FAILED_PRECONDITION")
        self.name = name


def _from_status(code: str, message: str, next_step: Optional[int],
                 blob: Optional[bytes]) -> Error:
    if next_step is not None:
        return Regrouped(message, next_step, blob or b"")
    return Error(message, code)


def _say(lines: List[str]) -> None:
    for line in lines:
        print(f"shardd: {line}", file=sys.stderr, flush=True)

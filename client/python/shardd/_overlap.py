"""Weights that come back while the next forward runs: a module waits for its own alone."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch

from shardd._parameters import Parameter


class _Unit:
    """A module that owns parameters itself."""

    def __init__(self, parameters: List[Parameter]) -> None:
        self.parameters = parameters
        self.verb: Optional[int] = None  # that brings its weights


class Overlap:
    """Hooks on a model. `recover` brings all weights after a fetch that failed."""

    def __init__(self, model: torch.nn.Module, parameters: List[Parameter],
                 recover: Callable[[], None]) -> None:
        by_tensor = {id(p.tensor): p for p in parameters if p.in_place and p.elements > 0}
        self.session: Any = None
        self._recover = recover
        self._units: List[_Unit] = []
        self._hooks: List[Any] = []
        unit_of: Dict[int, _Unit] = {}
        for module in model.modules():
            own = [by_tensor[id(t)] for t in module.parameters(recurse=False) if id(t) in by_tensor]
            fresh = [p for p in own if p.index not in unit_of]
            if fresh:
                unit = _Unit(fresh)
                self._units.append(unit)
                unit_of.update({p.index: unit for p in fresh})
            if own:
                # A tied parameter comes with the module that has it first.
                needs = list({id(unit_of[p.index]): unit_of[p.index] for p in own}.values())
                self._hooks.append(module.register_forward_pre_hook(
                    lambda *_, needs=needs: self._wait(needs)))
        lost = [p for p in by_tensor.values() if p.index not in unit_of]
        if lost:
            raise ValueError(f"parameter '{lost[0].name}' is of no module of the model: overlap "
                             "needs the model that owns all of them")
        self._hooks.append(model.register_state_dict_pre_hook(lambda *_: self.wait_all()))

    def start(self) -> None:
        """Asks for all weights, those of the modules that come first before the others."""
        for unit in self._units:
            unit.verb = self.session.start_fetch([p.memory() for p in unit.parameters])

    def _wait(self, units: List[_Unit]) -> None:
        for unit in units:
            if unit.verb is None:
                continue
            self.session.wait(unit.verb)
            unit.verb = None
            if self.session.failed:
                self.forget()
                return self._recover()
            for p in unit.parameters:
                p.touch()

    def wait_all(self) -> None:
        self._wait(self._units)

    def forget(self) -> None:
        for unit in self._units:
            unit.verb = None

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

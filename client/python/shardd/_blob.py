"""The trainer blob: what travels with every decision, so that a trainer can go on after it."""

from __future__ import annotations

import io
from typing import Any, Dict, List, Optional

import torch

_VERSION = 1
_MOST_BYTES = 1 << 20


def is_scheduler(obj: Any, optimizer: Any) -> bool:
    return getattr(obj, "optimizer", None) is optimizer and hasattr(obj, "step")


class Attached:
    """An object whose state travels."""

    def __init__(self, name: str, obj: Any, scheduler: bool, every: str) -> None:
        self.name = name
        self.obj = obj
        self.scheduler = scheduler
        self.every = every

    def state(self) -> Any:
        if hasattr(self.obj, "state_dict"):
            return self.obj.state_dict()
        return self.obj.get_state()

    def load(self, state: Any) -> None:
        if hasattr(self.obj, "load_state_dict"):
            self.obj.load_state_dict(state)
        else:
            self.obj.set_state(state)


def pack(groups: List[Dict[str, Any]], attached: List[Attached]) -> bytes:
    hyper = [{k: v for k, v in g.items() if k != "params" and _plain(v)} for g in groups]
    content = {"version": _VERSION, "groups": hyper,
               "attached": {a.name: a.state() for a in attached}}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def check_loads(blob: bytes) -> None:
    """Called once for what is attached: a blob that does not load would be of no use."""
    try:
        unpack(blob)
    except Exception as error:
        raise TypeError(
            "what was attached with attach_state holds more than plain values and tensors, which "
            f"would have to be unpickled ({error}); give it a state_dict() without") from error


def check_size(blob: bytes, attached: List[Attached]) -> None:
    if len(blob) <= _MOST_BYTES:
        return
    names = ", ".join(a.name for a in attached)
    raise ValueError(f"what was attached ({names}) has {len(blob)} bytes; {_MOST_BYTES} travel "
                     "with a step: attach less")


def unpack(blob: bytes) -> Optional[Dict[str, Any]]:
    """None for the blob of a job that was not trained by this package."""
    if not blob:
        return None
    content = torch.load(io.BytesIO(blob), weights_only=True)
    return content if isinstance(content, dict) and content.get("version") == _VERSION else None


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))

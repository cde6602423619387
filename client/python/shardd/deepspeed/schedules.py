"""DeepSpeed's schedules of the learning rate."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List

import torch


def _warmup(step: int, warmup: int, kind: str) -> float:
    if kind == "linear":
        return step / warmup
    return math.log(step + 1) / math.log(warmup)


def _ratio(params: Dict[str, Any]) -> Callable[[int], float]:
    """The part of the way from warmup_min_lr to warmup_max_lr, after `step` schedule steps."""
    warmup = max(2, int(params.get("warmup_num_steps", 1000)))
    kind = params.get("warmup_type", "log")
    total = params.get("total_num_steps")

    def warmup_lr(step: int) -> float:
        return _warmup(step, warmup, kind) if step < warmup else 1.0

    def warmup_decay(step: int) -> float:
        if step < warmup:
            return _warmup(step, warmup, kind)
        return max(0.0, (total - step) / max(1.0, total - warmup))

    return warmup_lr if total is None else warmup_decay


def _cosine(params: Dict[str, Any]) -> Callable[[int], float]:
    warmup = max(2, int(params.get("warmup_num_steps", 1000)))
    kind = params.get("warmup_type", "log")
    first, last = params.get("warmup_min_ratio", 0.0), params.get("cos_min_ratio", 0.0001)
    total = params["total_num_steps"]

    def ratio(step: int) -> float:
        if step < 0:
            return 0.0
        if step < warmup:
            return first + (1.0 - first) * _warmup(step, warmup, kind)
        part = (step - warmup + 1) / max(1, total - warmup)
        return max(0.0, last + (1.0 - last) * (1 + math.cos(math.pi * part)) / 2)

    return ratio


class Schedule:
    """With DeepSpeed's formula: `step()` after each optimizer step. torch's interface."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, params: Dict[str, Any]) -> None:
        self.optimizer = optimizer
        if kind != "WarmupLR" and params.get("total_num_steps") is None:
            raise ValueError(f"scheduler {kind} needs total_num_steps")
        self._least = float(params.get("warmup_min_lr", 0.0))
        self._most = float(params.get("warmup_max_lr", 0.001))
        if kind == "WarmupLR":
            params = {k: v for k, v in params.items() if k != "total_num_steps"}
        self._cosine = _cosine(params) if kind == "WarmupCosineLR" else None
        self._ratio = None if self._cosine else _ratio(params)
        self._base = [float(g["lr"]) for g in optimizer.param_groups]
        self.last_batch_iteration = -1
        self._set()

    def get_lr(self) -> List[float]:
        step = self.last_batch_iteration
        if self._cosine is not None:
            return [lr * self._cosine(step) for lr in self._base]
        ratio = self._ratio(step) if step >= 0 else 0.0
        return [self._least + (self._most - self._least) * ratio for _ in self._base]

    def _set(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr()):
            group["lr"] = lr

    def step(self) -> None:
        self.last_batch_iteration += 1
        self._set()

    def get_last_lr(self) -> List[float]:
        return [g["lr"] for g in self.optimizer.param_groups]

    def state_dict(self) -> Dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self._set()

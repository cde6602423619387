"""Random numbers that a trainer which was killed draws again."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


class Rng:
    """Seeds the generators of torch, Python and NumPy anew at every step, from (seed, step, slot).

    A rank that takes up step t draws what the one before it drew at step t, on any number of
    ranks, and nothing has to be carried along. Attach it: `opt.attach_state(shardd.Rng(seed))`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def begin_step(self, step: int, slot: int) -> None:
        """Called by the optimizer before the step's first forward."""
        text = f"{self.seed} {step} {slot}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
        torch.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed & 0xFFFF_FFFF)

    def state_dict(self) -> dict:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict) -> None:
        self.seed = state["seed"]

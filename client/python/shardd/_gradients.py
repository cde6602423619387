"""Gradients on their way: hooks that send each one as its last backward completes it."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any, List, Optional, Tuple, Union

import torch

from shardd._parameters import Parameter
from shardd.errors import Regrouped


class Gradients:
    """What has left of the current step and what has not.

    In the first step everything leaves in step(): how many backwards there are, and whether
    somebody changes gradients between backward and step, is not known before. From then on the
    gradients of the last backward leave from hooks, while backward goes on.
    """

    def __init__(self, parameters: List[Parameter], dtype: torch.dtype, stage: int,
                 accumulation: Union[int, str], scaler: Any, clipped: bool) -> None:
        if accumulation != "auto" and (not isinstance(accumulation, int) or accumulation < 1):
            raise ValueError(f"accumulation must be 'auto' or 1 or more, not {accumulation!r}")
        self.session: Any = None
        self.parameters = parameters
        self.dtype = dtype
        self.scale_of_step: Optional[torch.Tensor] = None  # a GradScaler's
        self._auto = accumulation == "auto"
        self._accumulation = 0 if accumulation == "auto" else int(accumulation)
        self._scaler = scaler
        # p.grad is given up as it leaves.
        self._give_up = stage >= 2 and scaler is None
        self._clipped = clipped
        self._streaming = False
        self._may_stream = True
        self.regrouped: Optional[Regrouped] = None  # seen before step() was called
        self._restart = False      # what has left of this step is not what is meant
        self._dropped = False      # some of this step's gradients are not here any more
        self._in_flight: List[Tuple[int, Any]] = []
        self._slots = (0, 1)
        self._warned = False
        self._pid = os.getpid()
        self.finish_interrupted: Any = None  # a WeakMethod: sees an interrupted step to its end
        self.sharded: Any = None  # the ShardedModule of stage 3

    @property
    def by_slot(self) -> bool:
        """Every backward is a slot of its own."""
        return self._slots[1] - self._slots[0] > 1

    # --- hooks ---

    def install_hooks(self) -> None:
        """On parameters that are trained and have none: some may have been unfrozen."""
        reference = weakref.ref(self)
        for p in self.parameters:
            if p.hook is None and p.tensor.requires_grad and p.tensor.is_leaf:
                def hook(_tensor: torch.Tensor, p: Parameter = p) -> None:
                    gradients = reference()
                    if gradients is not None:
                        gradients._on_gradient(p)
                p.hook = p.tensor.register_post_accumulate_grad_hook(hook)

    def remove_hooks(self) -> None:
        for p in self.parameters:
            if p.hook is not None:
                p.hook.remove()
                p.hook = None

    def _on_gradient(self, p: Parameter) -> None:
        if os.getpid() != self._pid:
            return  # a forked child's gradients are its own
        if self.sharded is not None:
            self.sharded.on_gradient(p)
        if self.session.ending:
            self.finish_interrupted()()
        gradient = p.tensor.grad
        if gradient is None:
            return
        self._refuse_sparse(p, gradient)
        p.backwards += 1
        if self.by_slot:
            return self._on_slot(p)
        if p.sent:
            if self._give_up:
                raise RuntimeError(
                    f"parameter '{p.name}' got another gradient in this step after the one before "
                    "had left (stages 2 and 3 give gradients up as they leave); say "
                    f"accumulation={p.backwards} or more")
            self._restart = True  # and this step teaches how many there may be
            p.note_gradient()
            return
        p.note_gradient()
        if self._streaming and p.backwards == self._accumulation and not self._restart:
            self._send(p, self._slots[0])

    def _on_slot(self, p: Parameter) -> None:
        slots = self._slots[1] - self._slots[0]
        if p.backwards > slots:
            raise RuntimeError(f"parameter '{p.name}' got gradient {p.backwards} of a step; rank "
                               f"has {slots} slots, one for each backward")
        self._send(p, self._slots[0] + p.backwards - 1)
        p.tensor.grad = None
        self._dropped = True

    @staticmethod
    def _refuse_sparse(p: Parameter, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise TypeError(f"the gradient of parameter '{p.name}' is sparse; shardd sums dense "
                            "gradients: set sparse=False of its embedding")

    # --- sending ---

    def _scale(self) -> Optional[float]:
        if self.scale_of_step is not None:
            return float(self.scale_of_step)
        return float(self._scaler.get_scale()) if self._scaler is not None else None

    def _send(self, p: Parameter, slot: int, scale: Union[float, None, str] = "hook") -> None:
        if self.regrouped is not None:
            p.tensor.grad = None  # the step is computed again: nothing of it is to be given
            p.sent = True
            return
        values = p.tensor.grad.detach()
        factor = self._scale() if scale == "hook" else scale
        if factor is not None and factor != 1.0:
            values = values.to(torch.float32) * (1.0 / factor)
        values = values.to("cpu", self.dtype).contiguous()
        if values.numel() > 0:
            verb = self.session.send_gradient(p.index, slot, values.data_ptr(),
                                              values.numel() * values.element_size())
            self._in_flight.append((verb, values))
        p.sent = True
        done = self.session.done
        while self._in_flight and self._in_flight[0][0] <= done:
            self._in_flight.pop(0)
        if self._give_up and self._streaming and not self.by_slot:
            p.tensor.grad = None
            p.gradient = None
            self._dropped = True

    def begin_step(self, slots: Tuple[int, int]) -> None:
        self._slots = slots
        self._restart = self._dropped = False
        self.regrouped = None
        self.scale_of_step = None
        for p in self.parameters:
            p.begin_step()
        self.install_hooks()

    def end_step(self) -> None:
        """After a step that was committed: learns from it."""
        self._in_flight.clear()
        if self._auto:
            most = max((p.backwards for p in self.parameters), default=0)
            self._accumulation = max(self._accumulation, most)
        self._streaming = self._may_stream and self._accumulation > 0

    def check_changed(self) -> None:
        """Before a step is ended: whether the gradients that left are those that are meant."""
        if self.by_slot:
            return
        if self.scale_of_step is not None and self._scaler is None:
            # Which scale a gradient had is known in step() alone.
            self._may_stream = False
        ours = self.scale_of_step is not None or self._scaler is not None
        for p in self.parameters:
            if p.gradient is None or not p.gradient_changed():
                continue
            if p.sent and p.tensor.grad is None:
                self._restart = True  # zero_grad before step: it is not to count
            elif not ours:
                self._restart = self._restart or p.sent
                self._may_stream = False
                self._warn_changed(p)

    def _warn_changed(self, p: Parameter) -> None:
        if self._warned:
            return
        self._warned = True
        what = (f"the gradient of '{p.name}' was changed between backward and step() "
                "(clip_grad_norm_?). ")
        if self._clipped:
            what += ("max_norm is set too, so it is clipped twice: leave clip_grad_norm_ out, the "
                     "daemon clips by the norm over all ranks. ")
        else:
            what += ("Give max_norm to shardd.Optimizer instead: the daemon clips by the norm over "
                     "all ranks, at no cost. ")
        warnings.warn(what + "Gradients leave in step() from now on, not during backward.",
                      stacklevel=4)

    def on_regrouped(self, regrouped: Regrouped) -> None:
        """What had left is dropped; the step goes on with what is still to come."""
        if self._dropped:
            self.regrouped = regrouped
        self.begin_again()

    def send_rest(self) -> List[int]:
        """Sends what has not left; indices of parameters without a gradient in this step."""
        if self.regrouped is not None:
            raise self.regrouped
        if self._restart:
            self._drop_errors()
            self.session.rejoin()
            self.begin_again()
        absent = []
        factor = None if self.by_slot else self._factor_of_rest()
        for p in self.parameters:
            if p.sent:
                continue
            if p.tensor.grad is None:
                absent.append(p.index)
                continue
            self._refuse_sparse(p, p.tensor.grad)
            self._send(p, self._slots[0], factor)
        self.session.check_gradients()
        return absent

    def _factor_of_rest(self) -> Optional[float]:
        # With a scaler that we know, scaler.unscale_ may have been called: then nothing is left.
        return float(self.scale_of_step) if self.scale_of_step is not None else None

    def _drop_errors(self) -> None:
        try:
            self.session.check_gradients()
        except RuntimeError:
            pass  # of gradients that are sent again

    def can_send_again(self) -> bool:
        return not self._dropped

    def begin_again(self) -> None:
        """Everything that has left was dropped: it is to be sent again."""
        self._restart = False
        self._in_flight.clear()
        for p in self.parameters:
            p.sent = False

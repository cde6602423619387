"""shardd.Optimizer: a torch.optim.Optimizer whose state is a daemon's."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import warnings
import weakref
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Tuple, Union

import torch

from shardd import _blob, _kinds, _native, _places, _torch_state
from shardd._gradients import Gradients
from shardd._overlap import Overlap
from shardd._parameters import (DTYPE_NAMES, Parameter, is_module, job_dtypes, make_parameters,
                                names_of_model, split_names)
from shardd.errors import Error, ParameterChanged, Regrouped, _say
from shardd.stage3 import ShardedModule

_live: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
# At the interpreter's exit: how long a daemon that is gone is waited for.
_EXIT_SECONDS = 0.25


class Optimizer(torch.optim.Optimizer):
    """An optimizer with the interface of `torch.optim.AdamW`, whose state a shardd daemon holds.

    Args:
      params: a module, parameters, `named_parameters()`, or groups of either, as in torch. All
        parameters that may ever be trained: one whose `requires_grad` is False is registered too,
        and trained from when it is True.
      lr, betas, eps, weight_decay: as in torch; per group too, and read anew at every step.
      optimizer: the rule: "adamw", "adam" (both with `amsgrad`), "sgd", "adagrad", "rmsprop" with
        torch's options, "lion", "lamb" (docs/optimizers.md).
      job: the job's name; default: SHARDD_JOB, else the script's name. A process that opens a
        job that exists goes on with it (see `resume`).
      model: names parameters that were given without names, in checkpoints and messages.
      stage: 0 to 3 (ZeRO). At 2 and 3 `p.grad` is given up as it is handed over; at 3 a parameter
        is there only while its module computes with it, or inside of `gathered()`.
      max_norm: clip gradients to this global norm, over all ranks, in the daemon; 0: do not.
      accumulation: backwards per step, or "auto": as many as there were in earlier steps. It only
        says when gradients leave: those of the last backward leave while it runs.
      slots: parts of the global batch; default: one a rank. With more than ranks, each backward
        of a step is one slot, and the step is the mean over slots for any number of ranks.
      grad_dtype: "fp32", "bf16", "fp16" of gradients on their way; default: the parameters'.
      grad_scaler: the `GradScaler` in use, so that gradients leave during backward with it too.
      overlap: step() returns when the step is committed, and weights come back while the next
        forward runs, which waits module by module. Parameters are to be read in a forward, in
        `model.state_dict()` or inside of `gathered()` then. Needs the model.
      durability: "process", "node" or "peer" (docs/durability.md); default: the daemon's.
      resume: "auto", "never" or "must".
      address: the daemon's socket; default: SHARDD_ADDRESS, the system's, else a private daemon.

    Several ranks (torchrun, `shardctl run`) share one job: the daemon averages their gradients, as
    DistributedDataParallel would, and no wrapper is needed. At the start every rank gets the
    weights of rank 0.
    """

    # GradScaler leaves unscaling and the check for Inf to us.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, lr: float = 1e-3, *, optimizer: str = "adamw",
                 job: Optional[str] = None, model: Optional[torch.nn.Module] = None,
                 stage: int = 1, max_norm: float = 0.0, accumulation: Union[int, str] = "auto",
                 slots: Optional[int] = None, grad_dtype: Any = None, grad_scaler: Any = None,
                 overlap: bool = False, durability: Optional[str] = None, resume: str = "auto",
                 address: Optional[str] = None, loss_scale: Optional[Dict[str, Any]] = None,
                 job_options: Optional[Dict[str, Any]] = None, **hyper: Any) -> None:
        self._session: Optional[_native.Session] = None
        self._pid = os.getpid()
        self._kind = _kinds.find_kind(optimizer, bool(hyper.get("amsgrad", False)))
        defaults = self._check_hyper(hyper)
        if is_module(params) and model is None:
            model = params
        stripped, names = split_names(params)
        aliases: Dict[int, List[str]] = {}
        if model is not None:
            model_names, aliases = names_of_model(model)
            names = {**model_names, **names}
        super().__init__(stripped, {**defaults, "lr": lr})
        self.parameters: List[Parameter] = make_parameters(self.param_groups, names, aliases)
        grads, weights = job_dtypes(self.parameters, grad_dtype)
        self._weight_dtype = weights
        self.rank, self.world_size = _places.rank_and_world()
        self.job = _places.job_name(job)
        self.stage = stage
        self.max_norm = float(max_norm)
        self.last: Optional[_native.Decision] = None  # the last step's decision
        self._attached: List[_blob.Attached] = []
        self._blob_checked = False
        self._loss: List[Tuple[float, int]] = []
        self._stamp = _torch_state.new_stamp()
        self._resume, self._address = resume, address
        self._job_options = {
            "name": self.job, "optimizer": self._kind.rule, "stage": stage, "max_norm": self.max_norm,
            "slots": self.world_size if slots is None else slots,
            "grad_dtype": DTYPE_NAMES[grads], "weight_dtype": DTYPE_NAMES[weights],
            "loss_scale": loss_scale or {"dynamic": False, "initial": 1.0},
            **({"durability": durability} if durability is not None else {}),
            **(job_options or {}),
        }
        self._sharded = self._shard(model) if stage == 3 else None
        self._overlap: Optional[Overlap] = None
        if overlap and stage < 3:  # stage 3 waits module by module anyway
            if model is None:
                raise ValueError("overlap=True waits module by module: give the model")
            self._overlap = Overlap(model, self.parameters, self._recover_weights)
        self._gradients = Gradients(self.parameters, grads, stage, accumulation, grad_scaler,
                                    clipped=max_norm > 0)
        self._gradients.finish_interrupted = weakref.WeakMethod(self._finish_interrupted)
        if self._sharded is not None:
            self._gradients.sharded = self._sharded
            self._sharded.on_regrouped = self._gradients.on_regrouped
        self._open(resume)
        _live.add(self)

    def _shard(self, model: Optional[torch.nn.Module]) -> ShardedModule:
        if model is None:
            raise ValueError("stage=3 gathers weights module by module: give the module, as in "
                             "shardd.Optimizer(model, stage=3) or model=")
        self._job_options["weights"] = "private"
        return ShardedModule(model, self.parameters)

    def gathered(self) -> ContextManager[None]:
        """All weights are there inside of it, at stage 3 too: to save or inspect the model."""
        self._finish_interrupted()
        return contextlib.nullcontext() if self._sharded is None else self._sharded.gathered()

    def _check_hyper(self, hyper: Dict[str, Any]) -> Dict[str, Any]:
        defaults = {**_kinds.torch_defaults(self._kind), **self._kind.defaults}
        for key, value in hyper.items():
            why = self._kind.refused.get(key)
            if why is not None and value:
                raise ValueError(f"{key}={value!r} is refused: {why}")
            if key in ("foreach", "fused", "capturable", "differentiable"):
                continue  # how torch's own kernels run
            if key not in defaults:
                raise TypeError(f"Optimizer got an unexpected option {key!r}; there are "
                                f"{', '.join(sorted(self._kind.defaults))} and those of its help")
            defaults[key] = value
        return defaults

    # --- the session ---

    def _open(self, resume: str, states: Optional[Dict[int, _torch_state.State]] = None,
              masters: Optional[Dict[int, torch.Tensor]] = None) -> None:
        specs = [(p.name, list(p.shape), p.group, p.aliases) for p in self.parameters]
        options = dict(self._job_options, groups=self._groups())
        self._begun_with = states or {}
        session = _native.Session(
            _places.session_options(self.rank, self.world_size, self._address, resume),
            json.dumps(options), specs, [])
        self._session = session
        self._gradients.session = session
        if self._overlap is not None:
            self._overlap.session = session
            self._overlap.forget()
        _say(session.take_log())
        if session.initialising:
            if self.rank == 0:
                for p in self.parameters:  # the job is complete with the last master
                    self._upload_moments(p, (states or {}).get(p.index))
                for p in self.parameters:
                    self._upload(p, (masters or {}).get(p.index))
            session.finish_upload()
        if self._sharded is not None:
            self._sharded.bind(session)
        self._fetch_all()
        self._begin_step()
        self._resumed = _blob.unpack(session.blob) if self._step > 1 else None

    def _upload(self, p: Parameter, master: Optional[torch.Tensor]) -> None:
        values = (p.tensor if master is None else master).detach()
        values = values.to("cpu", torch.float32).contiguous()
        self._session.upload(p.index, values.data_ptr(), values.numel())

    def _upload_moments(self, p: Parameter, state: Optional[_torch_state.State]) -> None:
        if state is None:
            return
        for m, name in enumerate(self._kind.states):
            values = state.moments[name].contiguous()
            self._session.upload_moment(m, p.index, values.data_ptr(), values.numel(),
                                        state.applied)

    def _groups(self) -> List[Dict[str, Any]]:
        return [{"name": str(g.get("name", f"group{i}")), "hyper": self._kind.hyper(g)}
                for i, g in enumerate(self.param_groups)]

    def _require(self) -> _native.Session:
        if self._session is None:
            raise Error(f"the optimizer of job '{self.job}' was closed; make a new one",
                        "FAILED_PRECONDITION")
        if os.getpid() != self._pid:
            raise Error(f"this process was forked from the one whose optimizer of job "
                        f"'{self.job}' this is; use it there, or make one here",
                        "FAILED_PRECONDITION")
        return self._session

    def _begin_step(self) -> None:
        self._step = self._session.next_step
        self._gradients.begin_step(self._session.slots)
        for attached in self._attached:
            if hasattr(attached.obj, "begin_step"):
                attached.obj.begin_step(self._step, self._session.slots[0])

    # --- weights ---

    def _recover_weights(self) -> None:
        """Of a fetch that failed: the daemon was restarted, or a rank died."""
        while True:
            try:
                self._session.check_gradients()
                return self._fetch_all()
            except Regrouped as regrouped:
                self._gradients.on_regrouped(regrouped)

    def _fetch_all(self) -> None:
        if self._sharded is not None:
            return
        direct = [p for p in reversed(self.parameters) if p.in_place and p.elements > 0]
        self._session.fetch([p.memory() for p in direct])
        for p in direct:
            p.touch()
        self._fetch_converted()

    @torch.no_grad()
    def _fetch_converted(self) -> None:
        for p in self.parameters:
            if not p.in_place and p.elements > 0:
                p.tensor.copy_(self._weights_of(p))

    def _weights_of(self, p: Parameter) -> torch.Tensor:
        buffer = torch.empty(p.shape, dtype=self._weight_dtype)
        self._session.fetch([(p.index, buffer.data_ptr(), buffer.numel() * buffer.element_size())])
        return buffer

    def _changed_converted(self) -> Optional[Parameter]:
        for p in self.parameters:
            if p.in_place or p.elements == 0:
                continue
            weights = self._weights_of(p).to(p.tensor.dtype)
            here = p.tensor.detach().to("cpu")
            if not bool(((here == weights) | ((here != here) & (weights != weights))).all()):
                return p
        return None

    # --- torch's interface ---

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Refused once the job is open: its layout is fixed. Give parameters that are trained
        later from the start, with `requires_grad` False."""
        if self._session is not None:
            raise RuntimeError(
                "a parameter group cannot be added to a job that is open: its layout is fixed; "
                "give all parameters to Optimizer(...) and set requires_grad when they are to be "
                "trained")
        super().add_param_group(param_group)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Ends the step: when it returns, it is committed and parameters are the new ones.

        A step with a NaN or Inf in any rank's gradients is skipped: `last.skipped` says so. Raises
        Regrouped where the step must be computed again (stages 2 and 3 after a death).
        """
        if closure is not None:
            raise TypeError(
                "shardd.Optimizer.step takes no closure: the daemon decides once a step, and ranks "
                "would have to agree on how often it is called; call it before: "
                "loss = closure(); optimizer.step()")
        self._finish_interrupted()
        if self._sharded is not None:
            self._sharded.end_step()
        gradients = self._gradients
        gradients.scale_of_step = getattr(self, "grad_scale", None)
        gradients.check_changed()
        decision = None
        while decision is None:
            try:
                decision = self._end_step(gradients.send_rest())
            except Regrouped as regrouped:
                decision = self._after_regroup(regrouped)
        self._after_step(decision)

    def _report(self, absent: List[int]) -> Dict[str, Any]:
        lo, hi = self._session.slots
        slots = list(self._loss[:hi - lo])
        slots += [slots[-1] if slots else (0.0, 0)] * (hi - lo - len(slots))
        blob = b""
        if self.rank == 0:
            blob = _blob.pack(self.param_groups, self._attached)
            _blob.check_size(blob, self._attached)
            if not self._blob_checked:
                _blob.check_loads(blob)
                self._blob_checked = True
        return {"slots": slots, "absent": absent, "blob": blob,
                "groups": json.dumps({"groups": self._groups()})}

    def _end_step(self, absent: List[int]) -> Optional[_native.Decision]:
        """None: gradients are to be sent again, to a job that was made anew."""
        changed = None if self._sharded is not None else self._changed_converted()
        if changed is not None:
            return self._parameter_changed(changed)
        direct = [] if self._sharded is not None else [
            p.memory() for p in reversed(self.parameters) if p.in_place and p.elements > 0]
        fetch = direct if self._overlap is None else []
        outcome = self._require().end_step(self._report(absent), direct, fetch)
        if isinstance(outcome, int):
            return self._parameter_changed(self.parameters[outcome])
        return outcome

    def _parameter_changed(self, p: Parameter) -> None:
        if self._step == 1 and self.world_size == 1 and self._gradients.can_send_again():
            # model.load_state_dict() after the optimizer was made: nothing is lost by it.
            _torch_state.make_anew(self, self._begun_with, None)
            return
        raise ParameterChanged(
            f"parameter '{p.name}' was changed in place since step {self._step - 1}, not by the "
            "optimizer (p.data.copy_, model.load_state_dict?): the daemon's masters are not what "
            "the gradients were computed with. Call opt.take_parameters() after such a change, on "
            "every rank, to train on from the parameters as they are", p.name)

    def _after_regroup(self, regrouped: Regrouped) -> Optional[_native.Decision]:
        """The decision, if the step was committed; None: send its gradients again."""
        session = self._session
        _say(session.take_log())
        if regrouped.next_step == self._step and self._gradients.can_send_again():
            self._gradients.begin_again()
            return None
        if regrouped.next_step == self._step + 1:
            record = session.step_records(self._step)[0]
            self._fetch_all()
            return record
        self._fetch_all()
        self._resumed = _blob.unpack(session.blob)
        for attached in self._attached:
            self._restore(attached)
        self._begin_step()
        raise regrouped

    def _finish_interrupted(self) -> None:
        """A step() that Ctrl-C ended may have been committed meanwhile: then it counts."""
        session = self._require()
        if self._overlap is not None:
            self._overlap.wait_all()
        if not session.ending:
            return
        try:
            decision = session.finish_step()
        except Regrouped as regrouped:
            decision = self._after_regroup(regrouped)
        if decision is not None and not isinstance(decision, int):
            self._after_step(decision)

    def _after_step(self, decision: Any) -> None:
        self.last = decision
        if decision.skipped:
            _say([f"{self.job}: step {decision.step} was skipped: {decision.reason}"])
        elif self._overlap is not None:
            self._overlap.start()
            self._fetch_converted()
        elif self._sharded is None:
            for p in self.parameters:
                if p.in_place:
                    p.touch()
            self._fetch_converted()
        self._loss = []
        self._gradients.end_step()
        self._begin_step()

    # --- what travels with a step ---

    def report(self, loss: Any, tokens: int = 0) -> None:
        """The loss of a backward, for `shardctl status` and step records. Optional."""
        self._loss.append((float(loss), int(tokens)))

    def attach_state(self, obj: Any, name: Optional[str] = None, *, every: str = "step") -> Any:
        """Lets the state of `obj` travel with every step, and restores it now if a job was taken
        up. Returns `obj`. All ranks attach the same objects in the same order.

        obj: has state_dict and load_state_dict, of plain values and tensors, alike on all ranks
          (it is rank 0's that is kept): a learning-rate scheduler of this optimizer, a
          `shardd.ResumableLoader`, a `shardd.Rng`, an epoch counter of your own. Its state is
          taken in step(): what an iteration changes is to be changed before.
        every: of a scheduler, which is stepped after the optimizer: "step", or "epoch" for one
          that is stepped at the end of an epoch.
        """
        if isinstance(obj, torch.Generator):
            if self.world_size > 1:
                raise TypeError("a torch.Generator has another state on every rank, and rank 0's "
                                "is the one that travels; attach shardd.Rng(seed)")
        elif not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise TypeError(f"{type(obj).__name__} has no state_dict and load_state_dict")
        if every not in ("step", "epoch"):
            raise ValueError(f"every must be 'step' or 'epoch', not {every!r}")
        taken = {a.name for a in self._attached}
        base = name or type(obj).__name__
        count = 1
        name = base
        while name in taken:
            count += 1
            name = f"{base}-{count}"
        attached = _blob.Attached(name, obj, _blob.is_scheduler(obj, self), every)
        self._attached.append(attached)
        self._blob_checked = False
        self._restore(attached)
        if hasattr(obj, "begin_step"):
            obj.begin_step(self._step, self._require().slots[0])
        return obj

    def _restore(self, attached: _blob.Attached) -> None:
        if self._resumed is None or attached.name not in self._resumed["attached"]:
            return
        attached.load(self._resumed["attached"][attached.name])
        if not attached.scheduler:
            return
        for group, saved in zip(self.param_groups, self._resumed["groups"]):
            group.update(saved)
        if attached.every == "step":
            # Its state is from before the step was committed; the one after it is still to come.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attached.obj.step()

    # --- state ---

    def state_dict(self) -> Dict[str, Any]:
        """In torch's own form: torch.optim.AdamW loads it. Reads the moments from the daemon."""
        self._finish_interrupted()
        return _torch_state.read(self, super().state_dict())

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Makes the job anew, from this state (torch's or ours) and the parameters as they are.
        With several ranks all of them call it, and torch.distributed is initialised."""
        self._finish_interrupted()
        _torch_state.load(self, state_dict)

    @contextlib.contextmanager
    def with_weights_changed(self) -> Iterator[None]:
        """All weights are there inside of it and may be changed, at stage 3 too; the call after it
        is load_state_dict or take_parameters."""
        self._require()
        if self._sharded is not None:
            self._sharded.unbind()
        yield

    def take_parameters(self) -> None:
        """Goes on from the parameters as they are here (rank 0's), after they were changed in
        place; moments and step counts stay. With several ranks as load_state_dict."""
        self._finish_interrupted()
        _torch_state.make_anew(self, _torch_state.read_states(self), None)

    def step_records(self, first_step: int = 1) -> List[_native.StepRecord]:
        """Loss, norm, lr of the last 1024 steps."""
        return self._require().step_records(first_step)

    def save_checkpoint(self, keep: int = 0, wait: bool = True) -> Tuple[int, str]:
        """Saves the job in the daemon's checkpoint directory (docs/checkpoints.md); one rank
        asks. Returns (step, directory)."""
        return self._require().save_checkpoint(keep, wait)

    @property
    def next_step(self) -> int:
        """The number of the step that is being computed, from 1; after a resume too."""
        return self._step

    @property
    def loss_scale(self) -> float:
        """Of the job, to multiply the next loss by; 1 unless loss_scale was given."""
        return self._require().loss_scale

    def close(self) -> None:
        """Leaves the job in good order; it stays with the daemon. A private daemon ends, and the
        state with it. Called at the interpreter's exit."""
        self._close(float("inf"))

    def _close(self, seconds_if_gone: float) -> None:
        session, self._session = self._session, None
        if session is None or os.getpid() != self._pid:
            return
        self._gradients.remove_hooks()
        if self._overlap is not None:
            self._overlap.remove_hooks()
            if not session.failed and not session.ending:
                self._overlap.wait_all()
        if self._sharded is not None:
            self._leave_sharded(session)
        if not session.ending:
            session.close(seconds_if_gone)

    def _leave_sharded(self, session: _native.Session) -> None:
        self._sharded.end_step()
        self._sharded.remove_hooks()
        if not session.ending and not session.failed:
            self._sharded.unbind()

    def __enter__(self) -> "Optimizer":
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}job: {self.job}, stage: {self.stage}\n)"


def _at_exit() -> None:
    # A script that died of an exception comes back: a private daemon keeps its state then.
    interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
    died = not interactive and getattr(sys, "last_type", None) is not None
    for optimizer in list(_live):
        if died:
            continue
        try:
            optimizer._close(_EXIT_SECONDS)
        except Exception as error:  # nobody is left to be told otherwise
            _say([f"{optimizer.job}: {error}"])


atexit.register(_at_exit)

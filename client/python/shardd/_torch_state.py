"""state_dict and load_state_dict in torch's form."""

from __future__ import annotations

import uuid
from typing import Any, Dict, NamedTuple, Optional

import torch

_MASTER, _FIRST_MOMENT = 1, 2
# A key of the first group: which state of which process this is.
STAMP = "shardd"


class State(NamedTuple):
    """The state of one parameter."""

    applied: int
    moments: Dict[str, torch.Tensor]      # fp32
    master: Optional[torch.Tensor] = None  # where the parameter holds less than it


def new_stamp() -> str:
    return uuid.uuid4().hex


def _stamp_of(optimizer: Any) -> Dict[str, Any]:
    return {"id": optimizer._stamp, "step": optimizer._step}


def read_states(optimizer: Any) -> Dict[int, State]:
    """{index: state} of the parameters that were ever updated."""
    session = optimizer._require()
    states: Dict[int, State] = {}
    for p in optimizer.parameters:
        applied = session.parameter_applied(p.index)
        if applied == 0:
            continue
        tensors = []
        wanted = [_FIRST_MOMENT + m for m in range(len(optimizer._kind.states))]
        if p.tensor.dtype is not torch.float32:
            wanted.append(_MASTER)
        for kind in wanted:
            values = torch.empty(p.shape, dtype=torch.float32)
            session.read_state(kind, p.index, values.data_ptr(), values.numel())
            tensors.append(values)
        moments = dict(zip(optimizer._kind.states, tensors))
        master = tensors[-1] if len(wanted) > len(moments) else None
        states[p.index] = State(applied, moments, master)
    return states


def read(optimizer: Any, packed: Dict[str, Any]) -> Dict[str, Any]:
    state = {}
    for index, one in read_states(optimizer).items():
        entry: Dict[str, Any] = dict(one.moments)
        if optimizer._kind.counts_steps:
            entry["step"] = torch.tensor(float(one.applied))
        if one.master is not None:
            entry["master"] = one.master
        state[index] = entry
    packed["state"] = state
    packed["param_groups"][0][STAMP] = _stamp_of(optimizer)
    return packed


def _check(optimizer: Any, state_dict: Dict[str, Any]) -> None:
    saved, here = state_dict["param_groups"], optimizer.param_groups
    if len(saved) != len(here):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for a, b in zip(saved, here):
        if len(a["params"]) != len(b["params"]):
            raise ValueError("loaded state dict contains a parameter group that doesn't match "
                             "the size of optimizer's group")


def _parse(optimizer: Any, state_dict: Dict[str, Any]) -> Dict[int, State]:
    order = [i for group in state_dict["param_groups"] for i in group["params"]]
    place = {saved: here for here, saved in enumerate(order)}
    names = optimizer._kind.states
    states: Dict[int, State] = {}
    for saved, entry in state_dict["state"].items():
        p = optimizer.parameters[place[saved]]
        # A buffer that torch does not keep without momentum is one of zeros.
        entry = {**entry, **{n: torch.zeros(p.shape) for n in names
                             if n == "momentum_buffer" and entry.get(n) is None}}
        counts = ["step"] if optimizer._kind.counts_steps else []
        missing = [n for n in [*counts, *names] if n not in entry]
        if missing:
            raise ValueError(f"the state of '{p.name}' has no {', '.join(missing)}: it is of "
                             f"another optimizer than {optimizer._job_options['optimizer']}")
        for name in names:
            if entry[name].shape != p.shape:
                raise ValueError(f"the {name} of '{p.name}' has shape {tuple(entry[name].shape)}, "
                                 f"the parameter {tuple(p.shape)}")
        moments = {n: entry[n].detach().to("cpu", torch.float32) for n in names}
        master = entry.get("master")
        states[p.index] = State(int(entry.get("step", 1)), moments, master)
    return states


def load(optimizer: Any, state_dict: Dict[str, Any]) -> None:
    _check(optimizer, state_dict)
    stamp = state_dict["param_groups"][0].get(STAMP)
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"]):
        group.update({k: v for k, v in saved.items() if k not in ("params", STAMP)})
    if stamp == _stamp_of(optimizer):
        return  # the state that the job has
    states = _parse(optimizer, state_dict)
    make_anew(optimizer, states, {i: s.master for i, s in states.items() if s.master is not None})


def _barrier(optimizer: Any) -> None:
    if optimizer.world_size == 1:
        return
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError("with several ranks this needs torch.distributed: call "
                           "init_process_group first, on every rank")
    torch.distributed.barrier()


def make_anew(optimizer: Any, states: Dict[int, State],
              masters: Optional[Dict[int, torch.Tensor]]) -> None:
    """A new job in the place of the old one: parameters as they are here (or `masters`), with
    these moments and step counts. Its steps count from 1."""
    session = optimizer._require()
    _barrier(optimizer)
    optimizer._gradients._drop_errors()
    if optimizer._sharded is not None and not optimizer._sharded.is_whole():
        optimizer._sharded.unbind()
    session.close(float("inf"))
    _barrier(optimizer)  # all ranks have left
    if optimizer.rank == 0:
        session.delete_job()
    _barrier(optimizer)
    optimizer._open("auto", states, masters or {})
    optimizer._stamp = new_stamp()

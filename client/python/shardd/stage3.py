"""Stage 3: a rank holds its shard of the weights, and a layer's only while it is used."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

import torch

from shardd._parameters import Parameter
from shardd.errors import ParameterChanged, Regrouped


class _Unit:
    """A module that owns parameters itself: they are gathered and released together."""

    def __init__(self, module: torch.nn.Module, parameters: List[Parameter]) -> None:
        self.module = module
        self.parameters = parameters
        self.backward = False             # gathered for its backward
        self.waiting: Set[int] = set()    # parameters whose gradient is still to come in it


class ShardedModule:
    """Hooks on a model: weights are gathered before a module's forward and backward and given back
    after, and those of the module that came next the last time are fetched meanwhile.

    A parameter that is not gathered is empty. `gathered()` gathers all.
    """

    def __init__(self, model: torch.nn.Module, parameters: List[Parameter]) -> None:
        by_tensor = {id(p.tensor): p for p in parameters}
        self._parameters = [p for p in parameters if p.tensor.numel() > 0]
        self._holders: Dict[int, int] = {p.index: 0 for p in self._parameters}
        self._views: Dict[int, torch.Tensor] = {}
        self._units: List[_Unit] = []
        self._units_of: Dict[int, List[_Unit]] = {}
        self._next: Dict[Any, _Unit] = {}    # what followed a use the last time
        self._last: Optional[Any] = None     # the use before this one
        self._prefetched: Dict[_Unit, int] = {}
        self._hooks: List[Any] = []
        self.session: Any = None
        for module in model.modules():
            own = [by_tensor[id(t)] for t in module.parameters(recurse=False) if id(t) in by_tensor]
            own = list({p.index: p for p in own if p.tensor.numel() > 0}.values())
            if own:
                self._add(_Unit(module, own))
        found = {p.index for unit in self._units for p in unit.parameters}
        for p in self._parameters:
            if p.index not in found:
                raise ValueError(f"parameter '{p.name}' is of no module of the model; at stage 3 "
                                 "all are: give the model that owns it")
            if not p.in_place:
                raise TypeError(f"parameter '{p.name}' ({p.tensor.dtype}, strides "
                                f"{tuple(p.tensor.stride())}, {p.tensor.device}): at stage 3 all "
                                "parameters have one dtype, are contiguous and on the CPU")

    def _add(self, unit: _Unit) -> None:
        self._units.append(unit)
        for p in unit.parameters:
            self._units_of.setdefault(p.index, []).append(unit)
        register = unit.module.register_forward_pre_hook
        self._hooks.append(register(lambda *_: self._before_forward(unit)))
        self._hooks.append(unit.module.register_forward_hook(
            lambda _module, _inputs, output: self._after_forward(unit, output)))

    # --- memory ---

    def bind(self, session: Any) -> None:
        """Parameters are the session's memory from here on, and empty."""
        self.session = session
        everything = [p.index for p in self._parameters]
        self._wait(session.gather(everything))
        for p in self._parameters:
            view = torch.frombuffer(session.weights(p.index), dtype=p.tensor.dtype)
            self._views[p.index] = view.view(p.shape)
            p.tensor.data = self._views[p.index]
        self._let_go(self._parameters)
        session.release(everything)

    def unbind(self) -> None:
        """Parameters have memory of their own again, with the weights in it."""
        with self.gathered(check=False):
            copies = {p.index: self._views[p.index].clone() for p in self._parameters}
        for p in self._parameters:
            p.tensor.data = copies[p.index]

    def is_whole(self) -> bool:
        return all(p.tensor.numel() > 0 for p in self._parameters)

    def _let_go(self, parameters: List[Parameter]) -> None:
        for p in parameters:
            p.tensor.data = self._views[p.index].new_empty(0)

    def _wait(self, verb: int) -> None:
        self.session.wait(verb)
        if not self.session.failed:
            return
        try:
            self.session.check_gradients()
        except Regrouped as regrouped:
            self.on_regrouped(regrouped)

    # Set by the optimizer: gradients that have left were dropped.
    on_regrouped: Callable[[Regrouped], None]

    def _acquire(self, unit: _Unit) -> None:
        verb = self._prefetched.pop(unit, None)
        fresh = [p for p in unit.parameters if self._holders[p.index] == 0]
        if verb is None and fresh:
            verb = self.session.gather([p.index for p in fresh])
        if verb is not None:
            generation = self.session.generation
            self._wait(verb)
            if self.session.generation != generation and fresh:
                self._wait(self.session.gather([p.index for p in fresh]))
        for p in unit.parameters:
            self._holders[p.index] += 1
            if p.tensor.numel() == 0:
                p.tensor.data = self._views[p.index]

    def _release(self, unit: _Unit) -> None:
        gone = []
        for p in unit.parameters:
            self._holders[p.index] -= 1
            if self._holders[p.index] == 0:
                gone.append(p)
        self._let_go(gone)
        # What is fetched for somebody else stays.
        awaited = {p.index for u in self._prefetched for p in u.parameters}
        give = [p.index for p in gone if p.index not in awaited]
        if give:
            self.session.release(give)

    def _use(self, key: Any, unit: _Unit) -> None:
        """One more use in this step; fetches what followed it the last time."""
        self._acquire(unit)
        if self._last is not None:
            self._next[self._last] = unit
        self._last = key
        following = self._next.get(key)
        if following is None or following in self._prefetched:
            return
        missing = [p.index for p in following.parameters if self._holders[p.index] == 0]
        if missing:
            self._prefetched[following] = self.session.gather(missing)

    # --- hooks ---

    def _before_forward(self, unit: _Unit) -> None:
        self._use((unit, "forward"), unit)

    def _after_forward(self, unit: _Unit, output: Any) -> None:
        tensors = [t for t in _tensors(output) if t.requires_grad]
        if torch.is_grad_enabled():
            for tensor in tensors:
                tensor.register_hook(lambda _grad: self._before_backward(unit))
        self._release(unit)

    def _before_backward(self, unit: _Unit) -> None:
        if unit.backward:
            return
        unit.backward = True
        unit.waiting = {p.index for p in unit.parameters if p.tensor.requires_grad}
        self._use((unit, "backward"), unit)

    def on_gradient(self, p: Parameter) -> None:
        """A parameter's gradient is complete: whoever waits for nothing else lets go."""
        for unit in self._units_of.get(p.index, []):
            unit.waiting.discard(p.index)
            if unit.backward and not unit.waiting:
                unit.backward = False
                self._release(unit)

    def end_step(self) -> None:
        """Nothing is held from EndStep on."""
        for unit in self._units:
            if unit.backward:
                unit.backward = False
                self._release(unit)
        left = {p.index for unit in self._prefetched for p in unit.parameters}
        self._prefetched.clear()
        give = [i for i in left if self._holders[i] == 0]
        if give:
            self.session.release(give)
        self._last = None

    @contextlib.contextmanager
    def gathered(self, check: bool = True) -> Iterator[None]:
        for unit in self._units:
            self._acquire(unit)
        before = self._sums() if check else {}
        try:
            yield
        finally:
            after = self._sums() if check else {}
            for unit in self._units:
                self._release(unit)
        for p in self._parameters:
            if before.get(p.index) != after.get(p.index):
                raise ParameterChanged(
                    f"parameter '{p.name}' was changed while it was gathered; at stage 3 such a "
                    "change is lost: change parameters before the optimizer is made", p.name)

    def _sums(self) -> Dict[int, int]:
        return {p.index: zlib.crc32(self._views[p.index].view(-1).view(torch.uint8).numpy())
                for p in self._parameters}

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _tensors(value: Any) -> List[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []

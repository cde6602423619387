"""Parameters as a job has them: names, dtypes, and what became of each in the current step."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch

# Names and numbers of proto/job_config.proto.
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPE_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
NAMED_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Parameter:
    """One parameter of the job, and its gradient in the current step."""

    __slots__ = ("index", "tensor", "shape", "elements", "name", "group", "aliases", "in_place", "hook", "backwards",
                 "sent", "gradient", "version")

    def __init__(self, index: int, tensor: torch.Tensor, name: str, group: int) -> None:
        self.index = index
        self.tensor = tensor
        self.shape = tensor.shape          # also while the tensor is empty, at stage 3
        self.elements = tensor.numel()
        self.name = name
        self.group = group
        self.aliases: List[str] = []
        # Weights are copied to its memory as they are: same dtype, contiguous, on the CPU.
        self.in_place = False
        self.hook: Any = None
        self.begin_step()

    def begin_step(self) -> None:
        self.backwards = 0      # that have added to the gradient
        self.sent = False       # the gradient has left
        self.gradient: Optional[torch.Tensor] = None  # as it was when it was complete
        self.version = -1

    def note_gradient(self) -> None:
        self.gradient = self.tensor.grad
        self.version = -1 if self.gradient is None else self.gradient._version

    def gradient_changed(self) -> bool:
        """Whether the gradient is another than the one that was noted."""
        gradient = self.tensor.grad
        if gradient is not self.gradient:
            return True
        return gradient is not None and gradient._version != self.version

    def memory(self) -> Tuple[int, int, int]:
        tensor = self.tensor
        return self.index, tensor.data_ptr(), tensor.numel() * tensor.element_size()

    def touch(self) -> None:
        """Tells autograd that the values have changed: by an in-place operation on nothing."""
        self.tensor.detach().as_strided((0,), (1,)).zero_()


def is_module(params: Any) -> bool:
    return isinstance(params, torch.nn.Module)


def split_names(params: Any) -> Tuple[List[Any], Dict[int, str]]:
    """Parameters or groups of them, without the names that came with them; {id: name}."""
    names: Dict[int, str] = {}

    def strip(items: Iterable[Any]) -> List[torch.Tensor]:
        out = []
        for item in items:
            if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
                names[id(item[1])] = item[0]
                item = item[1]
            out.append(item)
        return out

    if is_module(params):
        params = params.named_parameters()
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be a module, parameters, or groups of parameters; it is one "
                        "tensor: give [tensor]")
    given = list(params)
    if given and isinstance(given[0], dict):
        groups = []
        for group in given:
            inner = group["params"]
            inner = [inner] if isinstance(inner, torch.Tensor) else inner
            groups.append({**group, "params": strip(inner)})
        return groups, names
    return strip(given), names


def names_of_model(model: torch.nn.Module) -> Tuple[Dict[int, str], Dict[int, List[str]]]:
    """{id: name} and {id: other names of the same, tied parameter}."""
    names: Dict[int, str] = {}
    aliases: Dict[int, List[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if id(tensor) in names:
            aliases.setdefault(id(tensor), []).append(name)
        else:
            names[id(tensor)] = name
    return names, aliases


def make_parameters(param_groups: List[Dict[str, Any]], names: Dict[int, str],
                    aliases: Dict[int, List[str]]) -> List[Parameter]:
    parameters: List[Parameter] = []
    for g, group in enumerate(param_groups):
        for j, tensor in enumerate(group["params"]):
            name = names.get(id(tensor), f"group{g}.{j}")
            if tensor.dtype not in DTYPE_NAMES:
                raise TypeError(f"parameter '{name}' has dtype {tensor.dtype}; shardd trains "
                                "float32, bfloat16 and float16: convert it, or leave it out")
            if tensor.layout is not torch.strided:
                raise TypeError(f"parameter '{name}' is sparse ({tensor.layout}); make it dense")
            parameters.append(Parameter(len(parameters), tensor, name, g))
            parameters[-1].aliases = aliases.get(id(tensor), [])
    return parameters


def job_dtypes(parameters: List[Parameter], grad_dtype: Optional[Any]
               ) -> Tuple[torch.dtype, torch.dtype]:
    """(of gradients, of working weights): that of the parameters where they all have one, else
    fp32, which holds every value of the others."""
    dtypes = {p.tensor.dtype for p in parameters}
    weights = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if isinstance(grad_dtype, str):
        if grad_dtype not in NAMED_DTYPES:
            raise ValueError(f"grad_dtype must be one of {', '.join(NAMED_DTYPES)}, "
                             f"not {grad_dtype!r}")
        grad_dtype = NAMED_DTYPES[grad_dtype]
    if grad_dtype is None:
        # fp16 gradients need a loss scale: they travel as what they are only where it is the job's.
        grad_dtype = torch.float32 if weights is torch.float16 else weights
    if grad_dtype not in DTYPE_NAMES:
        raise ValueError(f"grad_dtype must be one of {', '.join(NAMED_DTYPES)}, not {grad_dtype!r}")
    for p in parameters:
        p.in_place = (p.tensor.dtype is weights and p.tensor.is_contiguous()
                      and p.tensor.device.type == "cpu")
    return grad_dtype, weights

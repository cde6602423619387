"""The optimizers by name: hyper-parameters of torch's groups to those of a job, and back."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch


class Kind(NamedTuple):
    """An optimizer of the daemon, in torch's form where torch has it."""

    rule: str                                              # its name for the daemon
    torch_class: Optional[Callable[..., torch.optim.Optimizer]]
    defaults: Dict[str, Any]
    states: List[str]                                      # names of moments 0, 1, ..
    hyper: Callable[[Dict[str, Any]], Dict[str, Any]]      # of a torch group
    refused: Dict[str, str]                                # option of torch -> why
    counts_steps: bool = True                              # torch's state has "step"


def _take(group: Dict[str, Any], *names: str) -> Dict[str, Any]:
    return {n: group[n] if isinstance(group[n], bool) else float(group[n]) for n in names}


def _adam(group: Dict[str, Any]) -> Dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {**_take(group, "lr", "eps", "weight_decay"), "beta1": float(beta1),
            "beta2": float(beta2)}


def _lion(group: Dict[str, Any]) -> Dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {**_take(group, "lr", "weight_decay"), "beta1": float(beta1), "beta2": float(beta2)}


def _lamb(group: Dict[str, Any]) -> Dict[str, Any]:
    return {**_adam(group), **_take(group, "min_trust", "max_trust")}


def _sgd(group: Dict[str, Any]) -> Dict[str, Any]:
    return _take(group, "lr", "momentum", "dampening", "nesterov", "weight_decay")


def _adagrad(group: Dict[str, Any]) -> Dict[str, Any]:
    return _take(group, "lr", "lr_decay", "eps", "weight_decay")


def _rmsprop(group: Dict[str, Any]) -> Dict[str, Any]:
    return {**_take(group, "lr", "momentum", "eps", "weight_decay"),
            "beta2": float(group["alpha"])}


_MAXIMIZE = {"maximize": "negate the loss instead"}
_TWO = ["exp_avg", "exp_avg_sq"]
_BETAS = {"betas": (0.9, 0.999), "eps": 1e-8}

KINDS: Dict[str, Kind] = {
    "adamw": Kind("adamw", torch.optim.AdamW, {**_BETAS, "weight_decay": 1e-2}, _TWO, _adam,
                  _MAXIMIZE),
    "adam": Kind("adam", torch.optim.Adam, {**_BETAS, "weight_decay": 0.0}, _TWO, _adam,
                 _MAXIMIZE),
    "sgd": Kind("sgd", torch.optim.SGD,
                {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
                ["momentum_buffer"], _sgd, _MAXIMIZE, counts_steps=False),
    "adagrad": Kind("adagrad", torch.optim.Adagrad,
                    {"lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0}, ["sum"], _adagrad,
                    {**_MAXIMIZE, "initial_accumulator_value": "sums begin at 0"}),
    "rmsprop": Kind("rmsprop", torch.optim.RMSprop,
                    {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
                    ["square_avg", "momentum_buffer"], _rmsprop,
                    {**_MAXIMIZE, "centered": "the daemon keeps no mean of the gradient"}),
    "lion": Kind("lion", None, {"betas": (0.9, 0.99), "weight_decay": 0.0}, ["exp_avg"], _lion, {}),
    "lamb": Kind("lamb", None, {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0,
                                "min_trust": 0.0, "max_trust": 0.0}, _TWO, _lamb, {}),
}


def find_kind(name: str, amsgrad: bool = False) -> Kind:
    """The kind of a name; with `amsgrad` that of Adam and AdamW with a maximum."""
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(f"optimizer={name!r}: this package has {', '.join(sorted(KINDS))}")
    if not amsgrad:
        return kind
    if name not in ("adam", "adamw"):
        raise ValueError(f"amsgrad=True is of adam and adamw, not of {name}")
    return kind._replace(rule=f"{name}_amsgrad", states=[*_TWO, "max_exp_avg_sq"])


def torch_defaults(kind: Kind) -> Dict[str, Any]:
    """What torch's own optimizer has in its groups, so that it loads our state_dict."""
    if kind.torch_class is None:
        return {}
    return dict(kind.torch_class([torch.zeros(1, requires_grad=True)], lr=1e-3).defaults)

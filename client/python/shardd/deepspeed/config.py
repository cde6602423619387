"""DeepSpeed's JSON: every key is honoured, holds anyway, or is refused by name.

keys.json says what becomes of each; `shardctl config explain` prints it from the same table.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import pathlib
from typing import Any, Dict, List, NamedTuple, Optional, Union


class Key(NamedTuple):
    """What becomes of one key."""

    key: str                          # dotted; "section.*": all of a section
    fate: str                         # honoured | always | refused
    text: str                         # what it becomes, or why not and what instead
    values: Optional[list] = None     # those that are taken; None: all
    otherwise: str = ""               # of others: why not and what instead
    neutral: Optional[list] = None    # of a refused key: values that ask for nothing
    switch: str = ""                  # of a refused section: it asks for nothing while this is off
    auto: str = ""                    # what "auto" is taken from


class Line(NamedTuple):
    """What became of one key of a file."""

    key: str
    value: Any
    fate: str
    text: str


class ConfigError(ValueError):
    """Keys of a DeepSpeed configuration that cannot be honoured: one a line."""


def load_keys() -> List[Key]:
    path = pathlib.Path(__file__).with_name("keys.json")
    return [Key(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def flatten(config: Dict[str, Any], prefix: str = "") -> Dict[str, Any]:
    flat: Dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _find(keys: Dict[str, Key], name: str) -> Optional[Key]:
    if name in keys:
        return keys[name]
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        found = keys.get(".".join(parts[:end]) + ".*")
        if found is not None:
            return found
    return None


def _is(value: Any, of: list) -> bool:
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in of)


def explain(config: Dict[str, Any]) -> List[Line]:
    """What becomes of each key; "unknown" for keys that DeepSpeed does not have either."""
    keys = {k.key: k for k in load_keys()}
    flat = flatten(config)
    lines = []
    for name, value in flat.items():
        key = _find(keys, name)
        if key is None and value == {}:
            key = _find(keys, f"{name}.*")
        if key is None:
            near = difflib.get_close_matches(name, [k for k in keys if not k.endswith("*")], 1)
            text = "no key of DeepSpeed" + (f"; did you mean {near[0]}?" if near else "")
            lines.append(Line(name, value, "unknown", text))
        elif value == "auto" and key.auto:
            lines.append(Line(name, value, key.fate, f"{key.text} (auto: {key.auto})"))
        elif key.fate == "refused":
            idle = (key.switch and not flat.get(key.switch, False)) or \
                (key.neutral is not None and _is(value, key.neutral))
            lines.append(Line(name, value, "off" if idle else "refused",
                              "asks for nothing" if idle else key.text))
        elif key.values is not None and not _is(value, key.values):
            why = key.otherwise or "it must be " + ", ".join(map(str, key.values))
            lines.append(Line(name, value, "refused", why))
        else:
            lines.append(Line(name, value, key.fate, key.text))
    return lines


def read(config: Union[str, os.PathLike, Dict[str, Any]]) -> Dict[str, Any]:
    """The configuration as a dict. ConfigError names every key that is refused or unknown."""
    if not isinstance(config, dict):
        config = json.loads(pathlib.Path(config).read_text(encoding="utf-8"))
    bad = [line for line in explain(config) if line.fate in ("refused", "unknown")]
    if bad:
        raise ConfigError("this DeepSpeed configuration asks for what shardd does not do:\n"
                          + "\n".join(f"  {b.key} = {json.dumps(b.value)}: {b.text}" for b in bad))
    return config


class Resolved(NamedTuple):
    """What a configuration says, with `auto` resolved and batch sizes worked out."""

    micro_batch: int
    accumulation: int
    stage: int
    max_norm: float
    dtype: str                            # of parameters: fp32, bf16, fp16
    grad_dtype: Optional[str]
    loss_scale: Optional[Dict[str, Any]]
    optimizer: Optional[Dict[str, Any]]   # keyword arguments of shardd.Optimizer
    scheduler: Optional[Dict[str, Any]]   # type and parameters
    job_options: Dict[str, Any]
    steps_per_print: int
    drop_last: bool
    seed: int
    breakdown: bool


def _training_arguments(args: Any, steps: Optional[int]) -> Dict[str, Any]:
    """What `auto` is, by dotted key, as Hugging Face's Trainer fills it in."""
    if args is None:
        return {}
    get = args.get if isinstance(args, dict) else lambda k, d=None: getattr(args, k, d)
    out: Dict[str, Any] = {
        "train_micro_batch_size_per_gpu": get("per_device_train_batch_size"),
        "gradient_accumulation_steps": get("gradient_accumulation_steps", 1),
        "gradient_clipping": get("max_grad_norm"),
        "optimizer.params.lr": get("learning_rate"),
        "optimizer.params.betas": [get("adam_beta1", 0.9), get("adam_beta2", 0.999)],
        "optimizer.params.eps": get("adam_epsilon", 1e-8),
        "optimizer.params.weight_decay": get("weight_decay", 0.0),
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": get("learning_rate"),
        "bf16.enabled": bool(get("bf16", False)),
        "bfloat16.enabled": bool(get("bf16", False)),
        "fp16.enabled": bool(get("fp16", False)),
    }
    if steps is not None:
        warmup = get("warmup_steps", 0) or math.ceil(steps * (get("warmup_ratio", 0.0) or 0.0))
        out["scheduler.params.warmup_num_steps"] = warmup
        out["scheduler.params.total_num_steps"] = steps
    return out


# Where auto means that shardd chooses.
_CHOSEN = ("zero_optimization.", "train_batch_size")


def _resolve_auto(flat: Dict[str, Any], args: Any, steps: Optional[int]) -> Dict[str, Any]:
    known = _training_arguments(args, steps)
    out = {}
    for key, value in flat.items():
        if value != "auto":
            out[key] = value
        elif known.get(key) is not None:
            out[key] = known[key]
        elif not key.startswith(_CHOSEN):
            raise ConfigError(
                f"{key} is \"auto\": give shardd.initialize the training arguments (args=) "
                + ("and num_training_steps= " if "num_steps" in key else "")
                + "that it is taken from, or write a number")
    return out


def _batches(flat: Dict[str, Any], world_size: int) -> Dict[str, int]:
    total, micro, gas = (flat.get("train_batch_size"), flat.get("train_micro_batch_size_per_gpu"),
                         flat.get("gradient_accumulation_steps"))
    if micro is None and total is None:
        raise ConfigError("give train_batch_size or train_micro_batch_size_per_gpu")
    if micro is None:
        micro = total // (world_size * (gas or 1))
    if gas is None:
        gas = 1 if total is None else total // (world_size * micro)
    if total is not None and total != micro * gas * world_size:
        raise ConfigError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {gas} x {world_size} ranks; leave one of them out")
    return {"micro": micro, "gas": gas}


def _section(flat: Dict[str, Any], prefix: str) -> Dict[str, Any]:
    return {k[len(prefix):]: v for k, v in flat.items() if k.startswith(prefix)}


def _optimizer(flat: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    if "optimizer.type" not in flat:
        return None
    given = _section(flat, "optimizer.params.")
    out = {k: given[k] for k in ("lr", "eps", "weight_decay") if k in given}
    if "betas" in given:
        out["betas"] = tuple(given["betas"])
    if flat["optimizer.type"].lower() == "adam" and "weight_decay" not in given:
        out["weight_decay"] = 0.0
    return {"optimizer": "adamw", **out}


def _loss_scale(flat: Dict[str, Any]) -> Dict[str, Any]:
    fixed = flat.get("fp16.loss_scale", 0)
    if fixed:
        return {"dynamic": False, "initial": float(fixed)}
    return {"dynamic": True, "initial": 2.0 ** flat.get("fp16.initial_scale_power", 16),
            "growth_interval": flat.get("fp16.loss_scale_window", 1000),
            "hysteresis": flat.get("fp16.hysteresis", 2),
            "floor": float(flat.get("fp16.min_loss_scale", 1))}


def resolve(config: Dict[str, Any], world_size: int, args: Any = None,
            num_training_steps: Optional[int] = None) -> Resolved:
    """From a configuration that `read` has taken."""
    flat = _resolve_auto(flatten(config), args, num_training_steps)
    batches = _batches(flat, world_size)
    bf16 = flat.get("bf16.enabled", False) or flat.get("bfloat16.enabled", False)
    fp16 = flat.get("fp16.enabled", False)
    if bf16 and fp16:
        raise ConfigError("bf16.enabled and fp16.enabled are both true; choose one")
    dtype = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    grad_dtype = flat.get("communication_data_type") or flat.get("data_types.grad_accum_dtype")
    job_options: Dict[str, Any] = {}
    bucket = flat.get("zero_optimization.reduce_bucket_size")
    if bucket:
        chunk = 65536
        job_options["bucket_elements"] = max(1, int(bucket) // chunk) * chunk
    kind = flat.get("scheduler.type")
    scheduler = {"type": kind, **_section(flat, "scheduler.params.")} if kind else None
    return Resolved(
        batches["micro"], batches["gas"], int(flat.get("zero_optimization.stage", 0)),
        float(flat.get("gradient_clipping", 0.0)), dtype, grad_dtype or ("fp16" if fp16 else None),
        _loss_scale(flat) if fp16 else None, _optimizer(flat), scheduler, job_options,
        int(flat.get("steps_per_print") or 0), bool(flat.get("dataloader_drop_last", False)),
        int(flat.get("seed", 0)), bool(flat.get("wall_clock_breakdown", False)))

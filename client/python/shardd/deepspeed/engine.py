"""shardd.initialize: DeepSpeed's engine over shardd.Optimizer."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import torch

from shardd._parameters import NAMED_DTYPES
from shardd._places import rank_and_world
from shardd.data import ResumableLoader
from shardd.deepspeed import config as ds_config
from shardd.deepspeed.schedules import Schedule
from shardd.errors import _say
from shardd.optimizer import Optimizer

_FILE = "shardd_engine_states.pt"


class Engine(torch.nn.Module):
    """What deepspeed.initialize returns as its engine: call it, backward(loss), step().

    A step of the optimizer is taken at every gradient_accumulation_steps-th step().
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, scheduler: Any,
                 resolved: ds_config.Resolved) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.config = resolved
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self._seconds: Dict[str, float] = {}
        optimizer.attach_state(self, name="engine")

    # --- training ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self.module(*args, **kwargs)
        finally:
            self._count("forward", began)

    def backward(self, loss: torch.Tensor, **unused: Any) -> torch.Tensor:
        """Divides the loss by gradient_accumulation_steps and does its backward."""
        began = time.perf_counter()
        self.optimizer.report(loss.detach())
        loss = loss / self.config.accumulation
        (loss * self.optimizer.loss_scale).backward()
        self.micro_steps += 1
        self._count("backward", began)
        return loss

    def step(self) -> None:
        if not self.is_gradient_accumulation_boundary():
            return
        began = time.perf_counter()
        self.optimizer.step()
        skipped = self.optimizer.last.skipped
        if self.lr_scheduler is not None and not skipped:
            self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.global_steps += 1
        self.skipped_steps += int(skipped)
        self._count("step", began)
        self._print()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps > 0 and self.micro_steps % self.config.accumulation == 0

    def _count(self, what: str, began: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - began

    def _print(self) -> None:
        every = self.config.steps_per_print
        if self.optimizer.rank != 0 or not every or self.global_steps % every != 0:
            return
        line = (f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
                f"loss_scale={self.optimizer.loss_scale}")
        if self.config.breakdown:
            line += "".join(f", {k}={v / every * 1000:.1f} ms" for k, v in self._seconds.items())
        self._seconds.clear()
        _say([line])

    # --- what it says of itself ---

    def train_batch_size(self) -> int:
        return self.config.micro_batch * self.config.accumulation * self.optimizer.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self.config.accumulation

    def gradient_clipping(self) -> float:
        return self.config.max_norm

    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def get_lr(self) -> List[float]:
        return [float(g["lr"]) for g in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> Optional[float]:
        return self.optimizer.last.grad_norm if self.optimizer.last is not None else None

    @property
    def global_rank(self) -> int:
        return self.optimizer.rank

    @property
    def world_size(self) -> int:
        return self.optimizer.world_size

    # --- its own state: what travels with a step, and what a checkpoint has ---

    def state_dict(self, *args: Any, **kwargs: Any) -> Dict[str, Any]:  # type: ignore[override]
        """The engine's counters; the model's weights are module.state_dict()."""
        # Taken in step(): the step that is being ended counts.
        return {"micro_steps": self.micro_steps, "global_steps": self.global_steps + 1,
                "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: Dict[str, Any], *args: Any,  # type: ignore[override]
                        **kwargs: Any) -> None:
        self.micro_steps = state["micro_steps"]
        self.global_steps = state["global_steps"]
        self.skipped_steps = state["skipped_steps"]

    def save_checkpoint(self, save_dir: Union[str, os.PathLike], tag: Optional[str] = None,
                        client_state: Optional[Dict[str, Any]] = None, **unused: Any) -> bool:
        """Model, optimizer in torch's form, scheduler and client_state, as one file by rank 0."""
        tag = tag or f"global_step{self.global_steps}"
        directory = pathlib.Path(save_dir) / tag
        content = {"optimizer": self.optimizer.state_dict(), "client_state": client_state or {},
                   "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler else None,
                   "counters": {"micro_steps": self.micro_steps, "global_steps": self.global_steps,
                                "skipped_steps": self.skipped_steps}}
        with self.optimizer.gathered():
            content["module"] = self.module.state_dict()
            if self.optimizer.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                torch.save(content, directory / f"{_FILE}.tmp")
                os.replace(directory / f"{_FILE}.tmp", directory / _FILE)
                (pathlib.Path(save_dir) / "latest").write_text(tag, encoding="utf-8")
        return True

    def load_checkpoint(self, load_dir: Union[str, os.PathLike], tag: Optional[str] = None,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        **unused: Any) -> Tuple[Optional[str], Optional[Dict[str, Any]]]:
        """(file, client_state) of what save_checkpoint wrote; (None, None) if there is none."""
        if tag is None:
            latest = pathlib.Path(load_dir) / "latest"
            if not latest.exists():
                return None, None
            tag = latest.read_text(encoding="utf-8").strip()
        path = pathlib.Path(load_dir) / tag / _FILE
        content = torch.load(path, weights_only=True, map_location="cpu")
        self._take_weights(content["module"])
        if load_optimizer_states:
            self.optimizer.load_state_dict(content["optimizer"])
        else:
            self.optimizer.take_parameters()
        if load_lr_scheduler_states and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(content["lr_scheduler"])
        self.load_state_dict(content["counters"])
        return str(path), content["client_state"]

    def _take_weights(self, weights: Dict[str, Any]) -> None:
        with self.optimizer.with_weights_changed():
            self.module.load_state_dict(weights)

    def save_16bit_model(self, save_dir: Union[str, os.PathLike],
                         save_filename: str = "pytorch_model.bin", **unused: Any) -> bool:
        with self.optimizer.gathered():
            weights = {k: v.bfloat16() if v.is_floating_point() and v.dtype is torch.float32 else v
                       for k, v in self.module.state_dict().items()}
            if self.optimizer.rank == 0:
                pathlib.Path(save_dir).mkdir(parents=True, exist_ok=True)
                torch.save(weights, pathlib.Path(save_dir) / save_filename)
        return True


def initialize(args: Any = None, model: Optional[torch.nn.Module] = None,
               optimizer: Optional[torch.optim.Optimizer] = None,
               model_parameters: Any = None, training_data: Any = None, lr_scheduler: Any = None,
               config: Union[str, os.PathLike, Dict[str, Any], None] = None,
               config_params: Any = None, num_training_steps: Optional[int] = None,
               collate_fn: Any = None, job: Optional[str] = None, **options: Any
               ) -> Tuple[Engine, Optimizer, Optional[ResumableLoader], Any]:
    """deepspeed.initialize: (engine, optimizer, data loader, scheduler).

    Args:
      args: Hugging Face's TrainingArguments (or a dict of them), where the configuration says
        "auto"; with num_training_steps for a scheduler's.
      model, model_parameters: parameters or groups; default: all of the model.
      optimizer: a torch.optim.AdamW, whose groups are taken over; else the configuration's.
      lr_scheduler: one of torch's on the optimizer, or a function of the optimizer that makes one.
      config: DeepSpeed's JSON: a path or a dict. ConfigError names each key that is refused.
      job, **options: of shardd.Optimizer.
    """
    if isinstance(args, torch.nn.Module):
        args, model = (model if not isinstance(model, torch.nn.Module) else None), args
    if model is None:
        raise TypeError("give initialize the model")
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ds_config.ConfigError("give initialize config=, the path of DeepSpeed's JSON")
    resolved = ds_config.resolve(ds_config.read(given), rank_and_world()[1], args,
                                 num_training_steps)
    model = model.to(NAMED_DTYPES[resolved.dtype]) if resolved.dtype != "fp32" else model
    ours = _make_optimizer(model, optimizer, model_parameters, resolved, job, options)
    scheduler = _make_scheduler(ours, lr_scheduler, resolved)
    engine = Engine(model, ours, scheduler, resolved)
    if scheduler is not None:
        ours.attach_state(scheduler, name="lr_scheduler")
    loader = None
    if training_data is not None:
        loader = ours.attach_state(ResumableLoader(
            training_data, resolved.micro_batch, seed=resolved.seed, collate_fn=collate_fn,
            drop_last=resolved.drop_last), name="loader")
    return engine, ours, loader, scheduler


def _make_optimizer(model: torch.nn.Module, given: Optional[torch.optim.Optimizer],
                    parameters: Any, resolved: ds_config.Resolved, job: Optional[str],
                    options: Dict[str, Any]) -> Optimizer:
    hyper = dict(resolved.optimizer or {})
    params = parameters if parameters is not None else model
    if given is not None:
        if type(given) not in (torch.optim.AdamW, torch.optim.Adam):
            raise TypeError(f"initialize takes over torch.optim.AdamW, not {type(given).__name__}")
        if isinstance(given, torch.optim.Adam) and not isinstance(given, torch.optim.AdamW) \
                and any(g["weight_decay"] for g in given.param_groups):
            raise ValueError("torch.optim.Adam adds weight decay to the gradient; the daemon's is "
                             "decoupled: use AdamW, or weight_decay=0")
        params, hyper = [dict(g) for g in given.param_groups], {}
        hyper = {k: given.defaults[k] for k in ("lr", "betas", "eps", "weight_decay")}
    elif resolved.optimizer is None:
        raise ds_config.ConfigError("the configuration has no optimizer section: add one, or give "
                                    "initialize a torch.optim.AdamW as optimizer=")
    if not isinstance(params, torch.nn.Module):
        params = [p for p in params]
    return Optimizer(params, model=model, job=job, stage=resolved.stage,
                     max_norm=resolved.max_norm, accumulation=resolved.accumulation,
                     grad_dtype=resolved.grad_dtype, loss_scale=resolved.loss_scale,
                     job_options=resolved.job_options, **{**hyper, **options})


def _make_scheduler(optimizer: Optimizer, given: Any, resolved: ds_config.Resolved) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    if resolved.scheduler is None:
        return None
    params = dict(resolved.scheduler)
    return Schedule(optimizer, params.pop("type"), params)

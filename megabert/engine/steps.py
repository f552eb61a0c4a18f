"""Kinds of step under DeepSpeed (0.19): who sums the gradients over the ranks, and who clips them or skips the update.

    HostStep            fp16, offloaded states     DeepSpeed sums, clips and skips, on the host
    GuardedStep         all others                 DeepSpeed sums; the optimizer's guard clips and skips, on the device
    FlatGradientStep    bf16 at stage 1            we sum (gradients.py); the guard clips and skips

DeepSpeed's own steps wait for the gradient norm once or more an update, at stage 0 in 16 bits once a parameter, to skip and
to clip on the host. Under a guard its wrapper hands its gradients to the optimizer's guard and its masters to the
optimizer, and does what only it can: copies masters into the model and gathers partitions.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megabert.config import Config, merge_deepspeed, to_deepspeed
from megabert.distributed.ranks import World
from megabert.engine.gradients import FlatGradients
from megabert.engine.zero_layout import ZeroLayout
from megabert.optim.guarded import GuardedOptimizer

# Of fp16's loss scale, which DeepSpeed keeps in objects of two kinds; stage 0 has no hysteresis.
SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def import_deepspeed(world: World) -> Any:
    """DeepSpeed without its log messages, and without what it would load or compile for parts that nothing here uses.

    On the CPU its shared-memory collective, which only inference uses, takes a minute to compile on a fresh machine. MLflow
    is for its search of settings, takes longer to load than all of DeepSpeed, and starts a thread. Its own Muon is imported
    wherever ZeRO starts, and decorated for torch.compile, whose compiler is then loaded.
    """
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    hidden = {} if "mlflow" in sys.modules else {"mlflow": None}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        import deepspeed
    finally:
        for name in hidden:
            del sys.modules[name]
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    communication.build_shm_op = lambda: None
    compile_, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    compiler.compile = compile_
    return deepspeed


def is_guarded(config: Config) -> bool:
    """Whether the optimizer's guard clips and skips: fp16's loss scale and offloaded gradients are on the host."""
    return config.precision != "fp16" and config.zero.offload == "none"


def settings(config: Config, world_size: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration, without what makes it look at gradients where a guard does. Raises ValueError naming a key
    of `extra` that contradicts the run's configuration."""
    merged = merge_deepspeed(to_deepspeed(config, world_size), dict(extra), "--deepspeed_config")
    stage, precision = config.zero.stage, config.precision
    if is_guarded(config):
        merged["gradient_clipping"] = 0.0
        if stage == 2 or (stage == 1 and precision == "fp32"):
            merged["zero_optimization"] = merged["zero_optimization"] | {"compute_grad_norm": False}
            if precision != "fp32":
                merged["bf16"] = merged["bf16"] | {"check_grad_overflow": False}
    if stage == 0:
        # `engine._do_optimizer_sanity_check` refuses it at stage 0, where torch itself accumulates in fp32 (grad_dtype).
        merged.pop("data_types", None)
    return merged


def loss_scaler(wrapper: Any) -> Any:
    """What holds the loss scale of DeepSpeed's optimizer: of one kind at stage 0, of another above; None in fp32 at 0."""
    return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)


def scale_and_floor(wrapper: Any) -> tuple[float, float]:
    """The current loss scale of DeepSpeed's optimizer, and its floor."""
    scaler = loss_scaler(wrapper)
    floor = getattr(scaler, "min_scale", None) or getattr(scaler, "min_loss_scale", None)
    return float(getattr(scaler, "cur_scale", 1.0)), float(floor or 1.0)


@dataclass(frozen=True)
class StepOutcome:
    """What an optimizer step did: fields as of `UpdateResult`."""

    grad_norm: Tensor
    applied: Tensor
    overflow: bool


class HostStep:
    """DeepSpeed's own step: it sums, clips and skips, and reads the norm on the host."""

    # DeepSpeed sums gradients over the ranks in its backward passes, where it waits for them, and divides by their number.
    deepspeed_sums = True

    def __init__(self, engine: Any, config: Config) -> None:
        self._engine, self._fp16 = engine, config.precision == "fp16"
        # `engine.backward` scales the loss for ZeRO alone.
        self._scales_loss = self._fp16 and config.zero.stage == 0
        wrapper = engine.optimizer
        scaler: Any = getattr(wrapper, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # skips at the floor are counted as bad updates instead
        if self._fp16:
            # At every stage DeepSpeed lets the loss scale grow before it divides the gradients by it, which halves those of
            # one update in 1,000 (where clipping does not hide it). So it grows after the step.
            self._update_scale = wrapper._update_scale
            wrapper._update_scale = lambda skip: self._update_scale(True) if skip else None

    def begin(self) -> None:
        self._scale, self._floor = scale_and_floor(self._engine.optimizer)

    def backward(self, loss: Tensor, last: bool, vetoed: bool) -> None:
        """Of one micro-step."""
        if vetoed:
            loss = loss * math.nan  # DeepSpeed skips it as a bad one
        self._engine.backward(loss * self._scale if self._scales_loss else loss)
        self._engine.step()

    def finish(self, sums: Tensor, vetoed: bool) -> StepOutcome:
        """The step. A collective. `sums`: what the update's losses add up to."""
        skipped, norm = bool(self._engine.optimizer.overflow), self._engine.get_global_grad_norm()
        # A skip that is fp16's search for a loss scale alone.
        searching = self._fp16 and skipped and not vetoed and self._scale > self._floor
        overflow = searching and bool(torch.isfinite(sums).all())
        if self._scales_loss and not skipped:
            norm = norm / self._scale
        if self._fp16 and not skipped:
            self._update_scale(False)
        applied = sums.new_full((), not skipped, dtype=torch.float32)
        return StepOutcome(sums.new_full((), float(norm), dtype=torch.float32), applied, overflow)


class GuardedStep:
    """A step that reads nothing back from the device: the optimizer's guard clips and skips there."""

    deepspeed_sums = True

    def __init__(
        self, engine: Any, config: Config, optimizer: GuardedOptimizer, gradients: Callable[[], list[Tensor]]
    ) -> None:
        """`gradients` lists those of this rank before a step."""
        self._engine, self._optimizer = engine, optimizer
        self.gradients, self._clip = gradients, config.optimizer.clip

    def begin(self) -> None: ...

    def backward(self, loss: Tensor, last: bool, vetoed: bool) -> None:
        """Of one micro-step."""
        self._engine.backward(loss)
        if not last:
            self._engine.step()  # which only counts

    def finish(self, sums: Tensor, vetoed: bool) -> StepOutcome:
        """The step. A collective."""
        norm = self._optimizer.guard(self.gradients(), self._clip, skip=vetoed)
        self._engine.step()
        assert self._optimizer.found_inf is not None
        return StepOutcome(norm, 1 - self._optimizer.found_inf, overflow=False)


class FlatGradientStep(GuardedStep):
    """A guarded step whose gradients are summed by `FlatGradients`, over the ranks during the last backward pass."""

    deepspeed_sums = False

    def __init__(self, *args: Any, flat: FlatGradients) -> None:
        super().__init__(*args)
        self.flat = flat

    def begin(self) -> None:
        self.flat.begin()

    def backward(self, loss: Tensor, last: bool, vetoed: bool) -> None:
        """Of one micro-step."""
        if last:
            self.flat.last()
        super().backward(loss, last, vetoed)

    def finish(self, sums: Tensor, vetoed: bool) -> StepOutcome:
        """The step. A collective."""
        self.flat.finish()
        return super().finish(sums, vetoed)


Step = HostStep | GuardedStep


def make_step(
    engine: Any, module: nn.Module, config: Config, world: World, optimizer: GuardedOptimizer, layout: ZeroLayout
) -> Step:
    """The kind of step that this run takes; DeepSpeed's wrapper and `engine` are changed for it."""
    if not is_guarded(config):
        return HostStep(engine, config)
    gradients = replace_step(engine.optimizer, module, layout)
    flat = take_gradients(engine, module, world.size)
    if flat is None:
        return GuardedStep(engine, config, optimizer, gradients)
    return FlatGradientStep(engine, config, optimizer, gradients, flat=flat)


def replace_step(wrapper: Any, module: nn.Module, layout: ZeroLayout) -> Callable[[], list[Tensor]]:
    """Replaces `wrapper.step` where it reads from the device; a function that lists this rank's gradients before a step.

    Over the ranks of a partitioned layout the lists hold each element once, and padding, which is zero. Stages 1 and 2 with
    flat partitions leave norm and overflow to the optimizer when `settings` disables their own.
    """
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # stage 3
        wrapper.step = lambda closure=None: _step_stage_3(wrapper)
        return lambda: [g for group in wrapper.averaged_gradients.values() for g in group]
    if hasattr(wrapper, "single_partition_of_fp32_groups"):  # stages 1 and 2
        return lambda: [g for group in wrapper.averaged_gradients.values() for g in group]
    if hasattr(wrapper, "fp32_groups_flat_partition"):  # stage 1 in bf16 with fp32 gradients
        wrapper.step = lambda closure=None: _step_stage_1(wrapper)
        partitions = wrapper.fp32_groups_gradient_flat_partition
        views = [
            flat[segment.start : segment.end]
            for master, flat in zip(layout.masters, partitions, strict=True)
            for segment in master.segments
        ]
        return lambda: views
    if hasattr(wrapper, "fp32_groups"):  # stage 0 in 16 bits
        wrapper.step = lambda closure=None: _step_stage_0(wrapper)
    return lambda: [p.grad for p in module.parameters() if p.grad is not None]


def take_gradients(engine: Any, module: nn.Module, world_size: int) -> FlatGradients | None:
    """The gradients of stage 1 in bf16, which DeepSpeed's `engine` then neither converts nor sums; None at another stage."""
    wrapper = engine.optimizer
    if not hasattr(wrapper, "fp32_groups_flat_partition"):
        return None
    wrapper.immediate_grad_update = True  # it leaves them to hooks, which are ours
    wrapper.zero_grad = lambda *args, **kwargs: None
    engine.enable_backward_allreduce = False
    groups = zip(wrapper.fp32_groups_gradients_flat, wrapper.bf16_groups, strict=True)
    return FlatGradients(list(groups), list(module.parameters()), world_size)


@torch.no_grad()
def _step_stage_0(wrapper: Any) -> None:
    masters = [master for group in wrapper.fp32_groups for master in group]
    parameters = [parameter for group in wrapper.fp16_groups for parameter in group]
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = parameter.grad  # fp32 already (grad_dtype), so no copy
    wrapper.optimizer.step()
    torch._foreach_copy_(parameters, masters)
    for master in masters:
        master.grad = None


@torch.no_grad()
def _step_stage_1(wrapper: Any) -> None:
    partitions = wrapper.fp32_groups_gradient_flat_partition
    for master, gradient in zip(wrapper.fp32_groups_flat_partition, partitions, strict=True):
        master.grad = gradient
    wrapper.optimizer.step()
    wrapper.update_lp_params()


@torch.no_grad()
def _step_stage_3(wrapper: Any) -> None:
    timers: set[str] = set()
    wrapper._pre_step()
    wrapper._partition_all_parameters()
    wrapper.zero_grad(set_to_none=True)
    for group in range(len(wrapper.fp16_groups)):
        wrapper._prepare_sub_group(group, timers)
        wrapper._optimizer_step(group)
        wrapper._reassign_or_swap_out_partitioned_parameters(group)
        wrapper._release_sub_group(group, timers)
    wrapper._post_step(timers)

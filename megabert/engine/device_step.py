"""Optimizer steps behind DeepSpeed's wrappers (0.19) that read nothing back from the device.

DeepSpeed's own steps wait for the gradient norm once or more an update, at stage 0 in 16 bits once a parameter, to skip
and to clip on the host. Here the wrapper hands its gradients to the optimizer's guard and its masters to the optimizer,
and does what only it can: copies masters into the model and gathers partitions. Stages 1 and 2 with flat partitions
leave all that to the optimizer when they are told so (`compute_grad_norm`, `check_grad_overflow`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megabert.engine.gradients import Gradients
from megabert.engine.zero_layout import ZeroLayout


def settings(stage: int, precision: str) -> dict[str, Any]:
    """DeepSpeed's keys without which it would look at gradients on its own; for any precision but fp16."""
    found: dict[str, Any] = {"gradient_clipping": 0.0}
    if stage == 2 or (stage == 1 and precision == "fp32"):
        found["zero_optimization"] = {"compute_grad_norm": False}
        if precision != "fp32":
            found["bf16"] = {"check_grad_overflow": False}
    return found


def install(wrapper: Any, module: nn.Module, layout: ZeroLayout) -> Callable[[], list[Tensor]]:
    """Replaces `wrapper.step` where it reads from the device; what lists this rank's gradients before a step.

    Over the ranks of a partitioned layout the lists hold each element once, and padding, which is zero.
    """
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # stage 3
        wrapper.step = lambda closure=None: _step_3(wrapper)
        return lambda: [g for group in wrapper.averaged_gradients.values() for g in group]
    if hasattr(wrapper, "single_partition_of_fp32_groups"):  # stages 1 and 2
        return lambda: [g for group in wrapper.averaged_gradients.values() for g in group]
    if hasattr(wrapper, "fp32_groups_flat_partition"):  # stage 1 in bf16 with fp32 gradients
        wrapper.step = lambda closure=None: _step_1(wrapper)
        partitions = wrapper.fp32_groups_gradient_flat_partition
        views = [
            flat[segment.start : segment.end]
            for master, flat in zip(layout.masters, partitions, strict=True)
            for segment in master.segments
        ]
        return lambda: views
    if hasattr(wrapper, "fp32_groups"):  # stage 0 in 16 bits
        wrapper.step = lambda closure=None: _step_0(wrapper)
    return lambda: [p.grad for p in module.parameters() if p.grad is not None]


def take_gradients(engine: Any, module: nn.Module, world: int) -> Gradients | None:
    """The gradients of stage 1 in bf16, which DeepSpeed's `engine` then neither converts nor sums; None at another stage."""
    wrapper = engine.optimizer
    if not hasattr(wrapper, "fp32_groups_flat_partition"):
        return None
    wrapper.immediate_grad_update = True  # it leaves them to hooks, which are ours
    wrapper.zero_grad = lambda *args, **kwargs: None
    engine.enable_backward_allreduce = False
    groups = zip(wrapper.fp32_groups_gradients_flat, wrapper.bf16_groups, strict=True)
    return Gradients(list(groups), list(module.parameters()), world)


@torch.no_grad()
def _step_0(wrapper: Any) -> None:
    masters = [master for group in wrapper.fp32_groups for master in group]
    parameters = [parameter for group in wrapper.fp16_groups for parameter in group]
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = parameter.grad  # fp32 already (grad_dtype), so no copy
    wrapper.optimizer.step()
    torch._foreach_copy_(parameters, masters)
    for master in masters:
        master.grad = None


@torch.no_grad()
def _step_1(wrapper: Any) -> None:
    partitions = wrapper.fp32_groups_gradient_flat_partition
    for master, gradient in zip(wrapper.fp32_groups_flat_partition, partitions, strict=True):
        master.grad = gradient
    wrapper.optimizer.step()
    wrapper.update_lp_params()


@torch.no_grad()
def _step_3(wrapper: Any) -> None:
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

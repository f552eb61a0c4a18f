"""AdamW and LAMB by the kernels of NVIDIA apex's FusedAdam and FusedLAMB, where that package is installed.

Of each the form that reads the learning rate, the update's number, the gradients' scale and the skip from the device
(apex csrc/multi_tensor_adam.cu `multi_tensor_adam_capturable_cuda`, csrc/multi_tensor_lamb_mp.cu), so that nothing is read
back; state and meaning are those of optimizers.AdamW and optimizers.Lamb.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megabert.config import Config
from megabert.optim.optimizers import _Guarded


def obstacle(config: Config, device: torch.device) -> str:
    """Why this run's optimizer cannot be apex's, or an empty string."""
    if device.type != "cuda":
        return "NVIDIA's apex needs a CUDA device"
    if config.zero.offload == "cpu":
        return "zero.offload=cpu keeps the states where apex has no kernels"
    if config.optimizer.name == "muon":
        return "apex has no Muon"
    if config.optimizer.name == "lamb" and config.zero.stage:
        return f"at zero.stage={config.zero.stage} apex's LAMB would have one trust ratio for a whole partition"
    if config.optimizer.split_qkv:
        return "apex's LAMB has one trust ratio a tensor; set optimizer.split_qkv=false"
    try:
        _kernels(config.optimizer.name)
    except (ImportError, AttributeError) as error:
        return f"NVIDIA's apex does not import ({error})"
    return ""


def _kernels(name: str) -> tuple[Any, Any]:
    """Apex's launcher over lists of tensors, and the kernel. Raises ImportError or AttributeError."""
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    return (multi_tensor_applier, amp_C.multi_tensor_lamb_mp if name == "lamb" else amp_C.multi_tensor_adam_capturable)


class _Apex(_Guarded):
    name = ""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._apply, self._kernel = _kernels(self.name)

    def _update(self) -> None:
        for group in self.param_groups:
            tensors = [p for p in group["params"] if p.grad is not None]
            if tensors:
                self._update_group(group, tensors)

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not self.state.get(tensor):
                self._begin(tensor)
        home, states = tensors[0].device, [self.state[t] for t in tensors]
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        skip = torch.zeros(1, device=home) if found is None else found.to(home).float().view(1)
        inverse = torch.ones(1, device=home) if scale is None else scale.to(home).reciprocal().float().view(1)
        torch._foreach_add_([state["step"] for state in states], (1 - skip).view(()))
        # full, not tensor: a number in a launch's arguments, which no copy from the host has to wait for
        lr = torch.full((1,), group["lr"], device=home)
        step = states[0]["step"].to(torch.int32).view(1)
        lists: list[list[Any]] = [
            [t.grad for t in tensors],
            [t.detach() for t in tensors],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
        ]
        self._launch(group, lists, skip, lr, step, inverse)

    def _launch(
        self, group: dict[str, Any], lists: list[list[Any]], skip: Tensor, lr: Tensor, step: Tensor, inverse: Tensor
    ) -> None:  # fmt: skip
        raise NotImplementedError


class ApexAdamW(_Apex):
    """AdamW by FusedAdam's kernel."""

    name = "adamw"

    def _launch(
        self, group: dict[str, Any], lists: list[list[Any]], skip: Tensor, lr: Tensor, step: Tensor, inverse: Tensor
    ) -> None:  # fmt: skip
        decoupled = corrected = 1
        self._apply(
            self._kernel, skip.int(), lists, lr, *group["betas"], group["eps"], step, decoupled, corrected,
            group["weight_decay"], inverse,
        )  # fmt: skip


class ApexLamb(_Apex):
    """LAMB by FusedLAMB's kernel; tensors are whole parameters. Gradients are consumed."""

    name = "lamb"

    def _launch(
        self, group: dict[str, Any], lists: list[list[Any]], skip: Tensor, lr: Tensor, step: Tensor, inverse: Tensor
    ) -> None:  # fmt: skip
        averaged = decoupled = corrected = 1
        norm, limit = (torch.zeros_like(lr), torch.ones_like(lr))  # it clips where norm > limit, and clipping is ours
        self._apply(
            self._kernel, skip.int(), lists, lr, *group["betas"], group["eps"], step, corrected, group["weight_decay"],
            averaged, decoupled, norm, limit, False, skip, inverse,
        )  # fmt: skip

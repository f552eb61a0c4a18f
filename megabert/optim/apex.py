"""AdamW and LAMB by the kernels of NVIDIA apex's FusedAdam and FusedLAMB, where that package is installed.

The kernels are those that read learning rate, step count, gradient scale and skip from the device (apex csrc/multi_tensor_adam.cu
`multi_tensor_adam_capturable_cuda`, csrc/multi_tensor_lamb_mp.cu), so that nothing is read back. State and update rules are those of
AdamW and Lamb. A different package has the name apex on PyPI.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from megabert.config import Config
from megabert.optim.guarded import GuardedOptimizer


def obstacle(config: Config, device: torch.device) -> str:
    """Why this run cannot use apex's optimizer; "" if it can."""
    if device.type != "cuda":
        return "NVIDIA's apex needs a CUDA device"
    if config.optimizer.name in ("muon", "stable_adamw"):
        return f"apex has no {config.optimizer.name}"
    if config.optimizer.name == "lamb" and config.zero.stage:
        return f"at zero.stage={config.zero.stage} apex's LAMB would have one trust ratio for a whole partition"
    if config.optimizer.split_qkv:
        return "apex's LAMB has one trust ratio a tensor; set optimizer.split_qkv=false"
    try:
        load_apex()
    except (ImportError, AttributeError) as error:
        return f"NVIDIA's apex does not import ({error})"
    return ""


def load_apex() -> tuple[Any, Any, Any]:
    """Apex's launcher over lists of tensors, its Adam kernel and its LAMB kernel."""
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("apex.multi_tensor_apply"):
        raise ImportError("the package apex installed here is another one; NVIDIA's is at github.com/NVIDIA/apex")
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    return multi_tensor_applier, amp_C.multi_tensor_adam_capturable, amp_C.multi_tensor_lamb_mp


class ApexAdamW(GuardedOptimizer):
    """AdamW by FusedAdam's kernel."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._apply, self._adam, self._lamb = load_apex()

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        device, states = tensors[0].device, [self.state[t] for t in tensors]
        skip = self.found_inf.view(1)
        inverse = torch.ones(1, device=device) if self.grad_scale is None else self.grad_scale.reciprocal().view(1)
        torch._foreach_add_([state["step"] for state in states], (1 - skip).view(()))
        # full passes the number as a kernel argument; tensor would copy from the host
        lr = torch.full((1,), group["lr"], device=device)
        moments = ([state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq"))
        lists = [[t.grad for t in tensors], [t.detach() for t in tensors], *moments]
        step = states[0]["step"].to(torch.int32).view(1)
        self._launch(group["weight_decay"], skip, inverse, lists, lr, *group["betas"], group["eps"], step)

    def _launch(self, decay: float, skip: Tensor, inverse: Tensor, lists: Any, lr: Tensor, *more: Any) -> None:
        decoupled = corrected = 1
        self._apply(self._adam, skip.int(), lists, lr, *more, decoupled, corrected, decay, inverse)


class ApexLamb(ApexAdamW):
    """LAMB by FusedLAMB's kernel; tensors are whole parameters. Gradients are consumed."""

    def _launch(self, decay: float, skip: Tensor, inverse: Tensor, lists: Any, lr: Tensor, *more: Any) -> None:
        averaged = decoupled = corrected = 1
        norm, limit = torch.zeros_like(lr), torch.ones_like(lr)  # the guard clips, so the kernel must not
        kernel = (corrected, decay, averaged, decoupled, norm, limit, False, skip, inverse)
        self._apply(self._lamb, skip.int(), lists, lr, *more, *kernel)

"""Precision that a device computes in: what `precision=auto` means on it, and where 16-bit products are only emulated.

Processors without AVX512-BF16 or AMX emulate products of bf16: on one core of an AMD EPYC of the third generation, 1 to 7
GFLOP/s where fp32 does 65.
"""

from __future__ import annotations

import torch

from megabert.common import environment
from megabert.common.logs import log
from megabert.config import Config
from megabert.distributed.process_group import World

AUTO = "auto"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}
SLOWEST_LAST = ("bf16", "fp16", "fp32")  # of what devices are fastest in
AMPERE = (8, 0)  # the first GPUs that multiply bf16


def usual(device: torch.device) -> str:
    """The precision that a device trains fastest in: bf16 where it multiplies that, else fp16 on a GPU and fp32 on a CPU."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= AMPERE else "fp16"
    return "bf16" if environment.multiplies_bf16() else "fp32"


def dtype_on(device: torch.device, precision: str) -> torch.dtype:
    """The type to compute a finished model in that was trained in `precision`: fp32 where the device would emulate that."""
    dtype = DTYPES[usual(device) if precision == AUTO else precision]
    return dtype if device.type != "cpu" or environment.multiplies_bf16() else torch.float32


def choose(asked: str, world: World, begun: str = "") -> str:
    """A precision in place of `auto`: that of the checkpoint gone on from (`begun`), else the one that all ranks are fast in.
    Bf16 that a CPU emulates is warned of. A collective."""
    common = SLOWEST_LAST[world.max_ints([SLOWEST_LAST.index(usual(world.device))])[0]]
    chosen = (begun or common) if asked == AUTO else asked
    if (chosen, common) == ("bf16", "fp32") and world.is_main:
        log.warning(
            "precision=bf16: a CPU without bf16 products emulates them, 10 to 60 times slower than fp32; a new run with "
            "precision=auto or fp32 is faster"
        )
    return chosen


def settle(config: Config, world: World, begun: str = "") -> Config:
    """`config` with the precision that `choose` gives. A collective."""
    return config.model_copy(update={"precision": choose(config.precision, world, begun)})

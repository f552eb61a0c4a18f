"""Ceiling of a device's matrix products, to which MFU is relative: measured once a machine, and kept for later starts."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from megabert.common import environment, errors, user_cache
from megabert.common.logs import log
from megabert.distributed.ranks import World

# Share of the processor time of its threads below which a measurement had other processes beside it.
ALONE = 0.8


class Ceiling(NamedTuple):
    """Peak rate of a device in TFLOP/s, and where it is from, in words."""

    tflops: float
    origin: str


def find_ceiling(world: World, dtype: torch.dtype, given: float) -> Ceiling:
    """The `given` ceiling (`peak_tflops`), or if that is 0 the one of rank 0's device. A collective."""
    if given:
        return Ceiling(given, "peak_tflops")
    return Ceiling(*world.broadcast(kept_ceiling(world.device, dtype) if world.is_main else None))


def kept_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """The ceiling that an earlier start has kept for the same device, threads, torch and type; otherwise it is measured."""
    cuda = device.type == "cuda"
    place = {
        "device": torch.cuda.get_device_name(device) if cuda else environment.processor(),
        "threads": 0 if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
    }
    file = user_cache.file_of("ceilings", place)
    kept = user_cache.read(file)
    tflops, again = kept.get("tflops"), f"remove {file} to measure it again"
    if isinstance(tflops, float) and 0 < tflops < math.inf:
        return Ceiling(tflops, f"kept of {kept.get('date')}; {again}")
    wall, used = time.perf_counter(), time.process_time()
    tflops = matmul_tflops(device, dtype)
    share = (time.process_time() - used) / (time.perf_counter() - wall) / torch.get_num_threads()
    if share < ALONE and not cuda:
        log.warning(
            f"other processes left the measurement of the matrix-product ceiling {share:.0%} of its processor time, so MFU reads too "
            "high; the next start measures it again"
        )
        return Ceiling(tflops, "measured, and not kept")
    try:
        user_cache.write(file, {"place": place, "tflops": tflops, "date": time.strftime("%Y-%m-%d")})
    except OSError as error:
        return Ceiling(tflops, f"measured, and not kept: {errors.describe(error)}")
    return Ceiling(tflops, f"measured; {again}")


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Best measured rate of a square-ish matrix product on `device`, in TFLOP/s."""
    m, k, n = (8192, 4096, 4096) if device.type == "cuda" else (1024, 1024, 4096)
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * m * k * n / best / 1e12

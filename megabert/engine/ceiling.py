"""Ceiling of a device's matrix products, to which MFU is relative: a GPU's datasheet, or measured once a machine and kept for later
starts as JSON under `$XDG_CACHE_HOME/megabert/ceilings` or `~/.cache/megabert/ceilings`."""

from __future__ import annotations

import hashlib
import json
import math
import time
from typing import NamedTuple

import torch

from megabert.common import environment, errors
from megabert.common.datasheets import datasheet_tflops
from megabert.common.files import cache_folder, canonical, compact, write_atomically
from megabert.common.logs import log
from megabert.distributed.ranks import World, on_main

QUEUED = 10  # products of a measurement on CUDA that are queued together
# Share of the processor time of its threads below which a measurement had other processes beside it.
ALONE = 0.8


class Ceiling(NamedTuple):
    """Peak rate of a device in TFLOP/s, and where it is from, in words."""

    tflops: float
    origin: str


def find_ceiling(world: World, dtype: torch.dtype, given: float) -> Ceiling:
    """The `given` ceiling (`peak_tflops`), or if that is 0 the one of rank 0's device: of bf16 on a GPU that is in
    `common/datasheets.py` its datasheet's. A collective."""
    if given:
        return Ceiling(given, "peak_tflops")
    if world.device.type == "cuda" and dtype == torch.bfloat16:
        sheet = world.broadcast(datasheet_tflops(torch.cuda.get_device_name(world.device)))
        if sheet:
            return Ceiling(sheet, "datasheet")
    return Ceiling(*on_main(world, lambda: kept_ceiling(world.device, dtype)))


def kept_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """The ceiling that an earlier start has kept for the same device, threads, torch and type; otherwise it is measured."""
    cuda = device.type == "cuda"
    place = {
        "device": torch.cuda.get_device_name(device) if cuda else environment.processor(),
        "threads": 0 if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
    }
    file = cache_folder("ceilings") / f"{hashlib.sha256(compact(place)).hexdigest()[:16]}.json"
    again = f"remove {file} to measure it again"
    try:
        kept = json.loads(file.read_bytes())
        if 0 < kept["tflops"] < math.inf:
            return Ceiling(kept["tflops"], f"kept of {kept.get('date')}; {again}")
    except (FileNotFoundError, NotADirectoryError):
        log.debug(f"{file}: measured now")
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.warning(f"{file}: {error}; what it held is measured again")
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
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, canonical({"place": place, "tflops": tflops, "date": time.strftime("%Y-%m-%d")}))
    except OSError as error:
        return Ceiling(tflops, f"measured, and not kept: {errors.describe(error)}")
    return Ceiling(tflops, f"measured; {again}")


def matmul_tflops(
    device: torch.device, dtype: torch.dtype, seconds: float = 0.5, shape: tuple[int, int, int] | None = None
) -> float:
    """Best measured rate of a large matrix product on `device`, or of one of `shape` (m, k, n), in TFLOP/s; on CUDA over products
    queued together, since a product alone includes its launch."""
    cuda = device.type == "cuda"
    m, k, n = shape or ((8192, 8192, 8192) if cuda else (1024, 1024, 4096))
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)
    out = torch.mm(a, b)
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        if cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(QUEUED):
                torch.mm(a, b, out=out)
            stop.record()
            stop.synchronize()
            best = min(best, start.elapsed_time(stop) / 1e3 / QUEUED)
        else:
            began = time.perf_counter()
            torch.mm(a, b)
            best = min(best, time.perf_counter() - began)
    return 2 * m * k * n / best / 1e12

"""Accelerators by name, the fabric between them, and the physical constants of the step-time model with their sources.

Bandwidths are one direction's, in bytes a second; peaks are dense 16-bit FLOP/s. Sources: docs/planner.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megabert.metrics import datasheet_tflops

GB = 1e9
MICROSECOND = 1e-6

# Share of the datasheet's peak that matrix products in whole waves of tiles reach: the one constant a generation that was
# fitted, each on its smallest published system, by benchmarks/bench_planner.py. Of FP8 runs it is what is left after
# `Constants.fp8`.
ACHIEVED = {"volta": 0.5482, "ampere": 0.5779, "hopper": 0.4549, "blackwell": 0.2815}


@dataclass(frozen=True)
class Device:
    """An accelerator as its datasheet has it. `link` is what joins those of a node, `domain` how many it joins at most."""

    generation: str
    peak: float
    achieved: float
    memory: float
    link: float
    processors: int  # streaming multiprocessors, over which a product's tiles are dealt out; 0: not modelled
    watts: float  # of the board
    domain: int = 0  # 0: a node's


def _device(
    sold_as: str, generation: str, memory: float, link: float, processors: int, watts: float, domain: int = 0
) -> Device:
    peak, achieved = datasheet_tflops(sold_as), ACHIEVED[generation]
    assert peak is not None, sold_as
    return Device(generation, peak * 1e12, achieved, memory * GB, link * GB, processors, watts, domain)


# memory and link GB/s, multiprocessors, watts: NVIDIA's datasheets and architecture papers. NVLink is sold by the sum of both
# directions, PCIe 4.0 x16 is 32 GB/s a direction. GB200: 72 GPUs in one NVLink domain.
DEVICES = {
    "v100": _device("V100", "volta", memory=900, link=150, processors=80, watts=300),
    "a100": _device("A100", "ampere", memory=2_039, link=300, processors=108, watts=400),
    "a100-40": _device("A100", "ampere", memory=1_555, link=300, processors=108, watts=400),
    "a100-pcie": _device("A100", "ampere", memory=1_935, link=32, processors=108, watts=300),
    "h100": _device("H100", "hopper", memory=3_350, link=450, processors=132, watts=700),
    "h200": _device("H200", "hopper", memory=4_800, link=450, processors=132, watts=700),
    "b200": _device("B200", "blackwell", memory=8_000, link=900, processors=148, watts=1_000),
    "gb200": _device("GB200", "blackwell", memory=8_000, link=900, processors=148, watts=1_200, domain=72),
}


@dataclass(frozen=True)
class Constants:
    """What holds for every system, stated once and never by row. `network` alone was chosen on the published runs."""

    memory: float = 0.85  # share of the memory bandwidth that streaming kernels reach
    link: float = 0.8  # share of NVLink or PCIe that collectives reach inside a node
    network: float = 0.35  # share of the adapters' line rate that collectives reach between nodes
    kernel: float = 3 * MICROSECOND  # to fill and drain the device, a kernel
    overlap: float = 0.5  # share of the backward pass that hides gradients, where software overlaps them at all
    fp8: float = 1.4  # rate of matrix products in FP8 over that in 16 bits
    base_latency: float = 8.4 * MICROSECOND  # a collective
    link_latency: float = 3.4 * MICROSECOND  # a hop inside a node
    network_latency: float = 14 * MICROSECOND  # a hop between nodes


@dataclass(frozen=True)
class Fabric:
    """Accelerators in nodes of `node`, whose network adapters give `network` bytes a second together (0: one node only)."""

    node: int
    network: float = 0.0

    @classmethod
    def of(cls, node: int, adapters: str) -> Fabric:
        """`8x400` is eight adapters of 400 Gbit/s a node; "" is no network. Raises ValueError for another form."""
        if node < 1:
            raise ValueError(f"--nodes-of {node}: a node has at least 1 GPU")
        if not adapters:
            return cls(node)
        found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", adapters)
        if not found or not math.prod(map(float, found.groups())):
            raise ValueError(f"--network {adapters}: write ADAPTERSxGBITS a node, e.g. 8x400 for eight of 400 Gbit/s")
        return cls(node, int(found[1]) * float(found[2]) * GB / 8)


def device(name: str) -> Device:
    """Raises ValueError for a name that is not in the table."""
    if name.lower() not in DEVICES:
        raise ValueError(f"--gpus {name}: not in the device table; choose one of {', '.join(DEVICES)}")
    return DEVICES[name.lower()]

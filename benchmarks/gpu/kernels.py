"""The costliest kernels of BERT-LARGE's training step, and what groups of them add up to."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.common.measure import synchronise
from benchmarks.gpu import steps
from megabert.data.shards import Dataset

TOP = 40  # kernels of a profile's table
GROUPS = {  # of kernels, by the first of these words in their lower-case name
    "attention": ("flash", "fmha", "attention", "softmax_mask"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitk"),
    "optimizer": ("multi_tensor", "foreach", "adam", "lamb"),
    "copies and zeroing": ("memcpy", "memset", "copy", "fill"),
}


def profile(setup: dict[str, Any], data: str, rows: int, device: str, small: bool, journal: str) -> dict[str, Any]:
    """The costliest kernels of one update, and what all of them add up to by groups of names."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    what, manifest = steps.Setup(**setup), Dataset(data).manifest
    steps.build(what, device, manifest.seq_len, rows, manifest.vocab_size, small, journal)
    batches = steps.updates(data, rows, steps.LIVE.cfg.seed, device)
    for batch in batches[: steps.WARM_UP]:
        steps.one(batch)
    synchronise(torch.device(device))
    kinds = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with recording(activities=kinds) as record:
        steps.one(batches[-1])
        synchronise(torch.device(device))
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    times = [
        (e.self_device_time_total if device == "cuda" else e.self_cpu_time_total, e.count, e.key)
        for e in record.key_averages()
        if e.device_type == wanted and not getattr(e, "is_user_annotation", False)
    ]
    times.sort(reverse=True)
    groups: dict[str, float] = {}
    for micro, _, name in times:
        groups[group_of(name)] = groups.get(group_of(name), 0.0) + micro / 1e3
    return {
        "setup": what.name, "seq_len": manifest.seq_len, "rows": rows, "total_ms": sum(t for t, _, _ in times) / 1e3,
        "groups_ms": groups,
        "kernels": [{"ms": t / 1e3, "calls": n, "name": name[:160]} for t, n, name in times[:TOP]],
    }  # fmt: skip


def group_of(kernel: str) -> str:
    name = kernel.lower()
    return next((g for g, words in GROUPS.items() if any(word in name for word in words)), "element-wise and other")

"""Candidates of each operation at BERT-LARGE's shapes, checked and timed in CUDA graphs; the optimizers and the accumulation."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.runner import Absent
from megabert.data.shards import Dataset

SECONDS = 0.4  # of timing a candidate, forward and backward; as much again for the forward pass alone


def shapes_of(data: str, rows: int, dropout: float, small: bool) -> Any:
    """What BERT-LARGE asks of its operations on the dataset's rows. Raises Absent where nothing times candidates."""
    try:
        from megabert.ops.candidates import Shapes
    except ImportError as error:
        raise Absent(f"not in this revision: {error}") from None
    dataset = Dataset(data)
    m = dataset.manifest
    sample = dataset.read(np.arange(min(256, dataset.rows)))
    size: dict[str, Any] = (
        {"hidden": 64, "heads": 2, "ffn": 256} if small else {"hidden": 1024, "heads": 16, "ffn": 4096}
    )
    return Shapes(
        rows=rows, seq_len=m.seq_len, slots=m.max_sequences, sequences=float((sample.bounds[:, :, 0] > 0).sum(1).mean()),
        predictions=-(-15 * m.seq_len // 100) + 1, vocab=m.vocab_size, padded_vocab=-(-m.vocab_size // 128) * 128,
        dropout=dropout, attention_dropout=dropout, dtype=torch.bfloat16, **size,
    )  # fmt: skip


def candidate(role: str, name: str, data: str, rows: int, dropout: float, device: str, small: bool) -> dict[str, Any]:
    """Milliseconds of forward and backward, and of forward alone. Raises RuntimeError where it is wrong or fails."""
    shapes, where = shapes_of(data, rows, dropout, small), torch.device(device)
    from megabert.ops import candidates as measured

    found = [c for c in measured.candidates(role, shapes, where) if c.name == name]
    if not found:
        raise Absent(f"not in this revision: no candidate {name} of {role}")
    if found[0].obstacle:
        raise Absent(found[0].obstacle)
    seconds = 0.0 if small else SECONDS
    try:
        (row,) = measured.measure(role, shapes, where, seconds, among=found).rows
    except measured.NoneRight as error:
        (row,) = error.rows
    if row.ms is None:
        raise RuntimeError(row.reason)
    problem = measured.PROBLEMS[role](shapes, where, rows, dropout > 0)
    inputs, function = [t.detach().requires_grad_() for t in problem.inputs], found[0].make(problem)
    times = measured.in_turn({name: measured.replayed(lambda: function(*inputs), where)}, where, seconds)[name]
    forward = sorted(times)[len(times) // 2]
    return {
        "role": role, "name": name, "seq_len": shapes.seq_len, "rows": rows, "dropout": dropout, "ms": row.ms,
        "low": row.low, "high": row.high, "forward_ms": forward, "backward_ms": row.ms - forward,
    }  # fmt: skip


def update(optimizer: str, device: str, small: bool) -> dict[str, Any]:
    """Milliseconds of one optimizer step over BERT-LARGE's parameters: norm, clip, update, copies into the bf16 weights.

    By events around whole steps, of which each is milliseconds of memory traffic, and not in a graph: a step may read back.
    """
    from benchmarks.gpu import steps

    where, setup = torch.device(device), steps.Setup(optimizer=optimizer)
    cfg = steps.make_config(
        setup, {"attention": "sdpa", "mlm_loss": "torch", "layer": "torch"}, 8, 2000 if small else 30_000, small
    )

    def build() -> steps.BertForPreTraining:
        with where:
            return steps.BertForPreTraining(cfg.model, cfg.ops, where.type, torch.bfloat16)

    loop = steps.Plain(cfg, build)
    kept = [torch.randn_like(gradient) * 1e-3 for gradient in loop.gradients]
    times = []
    for _ in range(3 if small else 12):
        torch._foreach_copy_(loop.gradients, kept)  # LAMB writes into the gradients
        times.append(event_seconds(loop.step, where))
    return {
        "optimizer": optimizer,
        "parameters": sum(m.numel() for m in loop.masters),
        "ms": 1e3 * sorted(times[2:])[len(times[2:]) // 2],
    }


def accumulate(device: str, small: bool) -> dict[str, float]:
    """Milliseconds of adding BERT-LARGE's bf16 gradients to fp32 sums, and of zeroing the sums."""
    from benchmarks.common.measure import kernel_seconds
    from benchmarks.gpu import steps

    where = torch.device(device)
    cfg = steps.make_config(steps.Setup(), {}, 8, 2000 if small else 30_000, small)
    with torch.device("meta"):
        module = steps.BertForPreTraining(cfg.model, cfg.ops, "cpu", torch.float32)
    gradients = [torch.randn(p.shape, device=where, dtype=torch.bfloat16) for p in module.parameters()]
    sums = [torch.zeros_like(g, dtype=torch.float32) for g in gradients]

    def call() -> None:
        torch._foreach_zero_(sums)
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)

    return {"ms": 1e3 * kernel_seconds(call, where, 0.0 if small else 0.2)}


def event_seconds(call: Any, device: torch.device) -> float:
    """Seconds of one call between two events, or by the wall clock on the CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3

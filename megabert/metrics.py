"""Figures of a run: loss, accuracy, throughput, FLOP utilisation, memory.

Figures count real tokens only: padding adds neither tokens nor FLOPs.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megabert.common.text import duration
from megabert.config import ModelConfig
from megabert.training.flops import attending_pairs, datasheet_tflops, training_flops

if TYPE_CHECKING:
    from megabert.data.loader import Update
    from megabert.distributed.process_group import World
    from megabert.engine.result import UpdateResult


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Best measured rate of a square-ish matrix product on `device`, in TFLOP/s: the ceiling MFU is measured against."""
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


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held so far, in GiB: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def measured(result: UpdateResult) -> torch.Tensor:
    """fp32 [2 k + 2] on the device: the loss, the loss and the accuracy of each of k terms, the gradient norm."""
    terms = torch.stack([result.losses, result.accuracies], 1).flatten()
    return torch.cat([result.loss.float().view(1), terms.float(), result.grad_norm.view(1)])


def figures(row: torch.Tensor, terms: Sequence[str]) -> dict[str, float]:
    """`train/…` figures of one row of `measured`, or of a mean of rows; a term without a name is left out."""
    loss, *pairs, norm = row.tolist()
    values = {"train/loss": loss}
    for term, its, accuracy in zip(terms, pairs[::2], pairs[1::2], strict=True):
        if term:
            values |= {f"train/{term}_loss": its, f"train/{term}_accuracy": accuracy}
    return values | {"train/grad_norm": norm}


class Means:
    """Means of `measured` over the updates that were applied; the sums stay on the device until `figures`."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # of `measured`, and of the updates

    def add(self, result: UpdateResult) -> None:
        """One more update; one that was skipped is not averaged in."""
        row = torch.cat([measured(result), result.applied.view(1)])
        row = row.where(result.applied > 0, 0.0)
        self._sums = row if self._sums is None else self._sums + row

    def state(self) -> list[float] | None:
        """The sums, exactly. Waits for the device."""
        return None if self._sums is None else self._sums.tolist()

    def resume(self, sums: Sequence[float] | None, device: torch.device) -> None:
        """Go on from the sums of `state`."""
        self._sums = None if sums is None else torch.tensor(sums, dtype=torch.float32, device=device)

    def figures(self, terms: Sequence[str]) -> dict[str, float]:
        """`train/…` figures; {} where no update was applied. Waits for the device."""
        if self._sums is None:
            return {}
        sums = self._sums.cpu()
        return figures(sums[:-1] / sums[-1], terms) if sums[-1] else {}


class Window:
    """Running sums between two log lines, part of a checkpoint: a window that a restart falls into is logged whole."""

    def __init__(self, world: World, counts: int) -> None:
        """`counts`: how many numbers of each update are summed over the ranks."""
        self._world, self._kinds = world, counts
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._seconds, self._means = 0.0, Means()
        self._counts = [0] * self._kinds  # of this rank

    @property
    def counts(self) -> list[int]:
        """This rank's part of what `drain` takes summed over the ranks."""
        return list(self._counts)

    def passed(self, seconds: float) -> None:
        """An update took so long on the slowest rank."""
        self._seconds += seconds

    def state(self) -> dict[str, Any]:
        """The sums of all ranks, as JSON. A collective."""
        counts = self._world.sum_ints(self._counts)
        return {"seconds": self._seconds, "counts": counts, "means": self._means.state()}

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a `state`; None, of a checkpoint that holds none: the window begins here."""
        self.reset()
        if saved is None:
            return
        self._seconds = saved["seconds"]
        self._means.resume(saved["means"], self._world.device)
        if self._world.is_main:  # for all ranks, whose number may be another
            self._counts = list(saved["counts"])


class Meter(Window):
    """Figures of the updates between two log lines: results stay on the device, counts on the host, until `drain`."""

    def __init__(self, world: World, model: ModelConfig, terms: Sequence[str], peak_tflops: float) -> None:
        super().__init__(world, counts=4)  # tokens, sequences, predictions, pairs of a query and a key
        self._model, self._terms, self.peak_tflops = model, terms, peak_tflops
        cuda = world.device.type == "cuda"
        self._datasheet = datasheet_tflops(torch.cuda.get_device_name(world.device)) if cuda else None

    def add(self, result: UpdateResult, update: Update) -> None:
        """One update. The figures of a skipped update are not averaged in, its counts are."""
        self._counts[0] += update.tokens
        self._counts[1] += update.sequences
        self._counts[2] += update.predictions
        squares = sum(int((b.lengths.numpy().astype(np.int64) ** 2).sum()) for b in update.batches)
        self._counts[3] += round(attending_pairs(squares, update.tokens, update.objective == "causal"))
        self._means.add(result)

    def drain(self, counts: Sequence[int]) -> dict[str, float]:
        """Means since the last call, `train/…` and `perf/…`; `counts` are summed over all ranks."""
        tokens, sequences, predictions, pairs = counts
        flops = training_flops(self._model, tokens, pairs, predictions, sequences)
        values = self._means.figures(self._terms)
        seconds = max(self._seconds, 1e-9)
        per_device = flops / seconds / self._world.size / 1e12
        values |= {
            "perf/sequences_per_sec": sequences / seconds,
            "perf/tokens_per_sec": tokens / seconds,
            "perf/tflops_per_device": per_device,
            "perf/mfu": per_device / self.peak_tflops,
        }
        if self._datasheet is not None:
            values["perf/mfu_datasheet"] = per_device / self._datasheet
        self.reset()
        return values


def progress_line(values: Mapping[str, Any], total_steps: int, eta_seconds: float) -> str:
    """One line a person reads while the run goes on."""
    return (
        f"step {values['step']:>7,}/{total_steps:,}  loss {values['train/loss']:7.4f}"
        f"  mlm {values['train/mlm_accuracy']:6.2%}  {values['perf/sequences_per_sec']:8,.1f} seq/s"
        f"  {values['perf/tokens_per_sec']:10,.0f} tok/s  MFU {values['perf/mfu']:6.1%}"
        f"  lr {values['train/lr']:.2e}  |g| {values['train/grad_norm']:6.3f}  ETA {duration(eta_seconds)}"
    )

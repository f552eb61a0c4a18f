"""What a run reports: `metrics.jsonl` is the truth, TensorBoard and the terminal show the same numbers.

Figures count real tokens only: padding adds neither tokens nor FLOPs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megabert.config import Config, ModelConfig
from megabert.folder import write_whole

if TYPE_CHECKING:
    from megabert.data import Update
    from megabert.distributed import World
    from megabert.engine import UpdateResult


def attending_pairs(squares: float, tokens: float, causal: bool) -> float:
    """How many (query, key) pairs sequences have whose lengths sum to `tokens` and their squares to `squares`."""
    return (squares + tokens) / 2 if causal else squares


def training_flops(model: ModelConfig, tokens: int, pairs: int, predictions: int, sequences: int) -> float:
    """FLOPs of forward and backward over `tokens` real tokens in `sequences`, with `pairs` of a query and a key.

    6 per weight and token for the matrix products, 12·d a layer for each pair of attending tokens, and the vocabulary
    product on predicted positions only (Kaplan et al. 2020, section 2.1, without embeddings).
    """
    d, ffn = model.hidden, model.ffn
    encoder = 6 * model.layers * (4 * d * d + 2 * d * ffn) * tokens
    attention = 12 * model.layers * d * pairs
    heads = 6 * (model.vocab_size * d + d * d) * predictions + (6 * d * d * sequences if model.nsp else 0)
    return float(encoder + attention + heads)


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


def doubles(output: Sequence[torch.Tensor]) -> torch.Tensor:
    """A module's output, k loss sums and k counts of right answers, as fp64 [2 k]."""
    return torch.stack([value.double() for value in output])


def loss_table(output: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """fp64 [k, 3]: loss sum, right answers and items of each term, of a module's output for one batch."""
    values = doubles(output)
    return torch.stack([*values.view(2, -1), values.new_tensor(counts)], 1)


def measured(result: UpdateResult) -> torch.Tensor:
    """fp32 [2 k + 2] on the device: the loss, the loss and the accuracy of each of k terms, the gradient norm."""
    terms = torch.stack([result.losses, result.accuracies], 1).flatten()
    norm = torch.as_tensor(result.grad_norm, dtype=torch.float32, device=terms.device)
    return torch.cat([result.loss.float().view(1), terms.float(), norm.view(1)])


def figures(row: torch.Tensor, terms: Sequence[str]) -> dict[str, float]:
    """`train/…` figures of one row of `measured`, or of a mean of rows; a term without a name is left out."""
    loss, *pairs, norm = row.tolist()
    values = {"train/loss": loss}
    for term, its, accuracy in zip(terms, pairs[::2], pairs[1::2], strict=True):
        if term:
            values |= {f"train/{term}_loss": its, f"train/{term}_accuracy": accuracy}
    return values | {"train/grad_norm": norm}


def as_json(values: dict[str, Any]) -> str:
    """One line of JSON; what JSON has no number for is written as text."""
    return json.dumps({key: _finite(value) for key, value in values.items()})


class Meter:
    """Running sums between two log lines: results stay on the device, counts on the host, until `drain`."""

    _sums: torch.Tensor | None  # loss and accuracy sums of the updates that were not skipped

    def __init__(
        self, world: World, model: ModelConfig, terms: Sequence[str], peak_tflops: float, causal: bool = False
    ) -> None:
        self._world, self._model, self._terms, self._peak = world, model, terms, peak_tflops
        self._causal = causal
        self._reset()

    def add(self, result: UpdateResult, update: Update, seconds: float) -> None:
        """One update that took `seconds`. The figures of a skipped update are not averaged in, its time is."""
        self._seconds += seconds
        self._counts[0] += update.tokens
        self._counts[1] += update.sequences
        self._counts[2] += update.predictions
        self._counts[3] += sum(int((b.lengths.long() ** 2).sum()) for b in update.batches)
        if result.skipped:
            return
        self._updates += 1
        row = measured(result)
        self._sums = row if self._sums is None else self._sums + row

    def drain(self) -> dict[str, float]:
        """Means since the last call, over all ranks: `train/…` and `perf/…`. Every rank must call it."""
        tokens, sequences, predictions, squares = self._world.sum_ints(self._counts)
        pairs = round(attending_pairs(squares, tokens, self._causal))
        flops = training_flops(self._model, tokens, pairs, predictions, sequences)
        values: dict[str, float] = {}
        if self._sums is not None:
            values = figures(self._sums / self._updates, self._terms)
        seconds = max(self._seconds, 1e-9)
        values |= {
            "perf/sequences_per_sec": sequences / seconds,
            "perf/tokens_per_sec": tokens / seconds,
            "perf/tflops_per_device": flops / seconds / self._world.size / 1e12,
            "perf/mfu": flops / seconds / self._world.size / 1e12 / self._peak,
        }
        self._reset()
        return values

    def _reset(self) -> None:
        self._seconds, self._updates = 0.0, 0
        self._counts = [0, 0, 0, 0]  # tokens, sequences, predictions, squared lengths
        self._sums = None


class JsonLines:
    """`metrics.jsonl`: one object a logged step. Lines past the step a run resumes from are cut."""

    def __init__(self, path: Path, resume_step: int) -> None:
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) <= resume_step]
            write_whole(path, "".join(f"{line}\n" for line in kept).encode())
        self._file = open(path, "a")  # noqa: SIM115 - lives as long as the run

    def write(self, values: dict[str, Any]) -> None:
        self._file.write(as_json(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars, the resolved config as text, and hparams with the final evaluation."""

    def __init__(self, folder: Path, config: Config, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)
        self._config = config
        text = json.dumps(config.model_dump(), indent=2)
        self._writer.add_text("config", f"```json\n{text}\n```", resume_step)

    def write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if "/" in name and isinstance(value, int | float):
                self._writer.add_scalar(name, value, values["step"])

    def hparams(self, results: dict[str, float]) -> None:
        flat = _flatten(self._config.model_dump())
        self._writer.add_hparams(
            flat, {f"final/{k.split('/')[-1]}": v for k, v in results.items()}, run_name="hparams"
        )

    def close(self) -> None:
        self._writer.close()


def progress_line(values: dict[str, Any], total_steps: int, eta_seconds: float) -> str:
    """One line a person reads while the run goes on."""
    return (
        f"step {values['step']:>7,}/{total_steps:,}  loss {values['train/loss']:7.4f}"
        f"  mlm {values['train/mlm_accuracy']:6.2%}  {values['perf/sequences_per_sec']:8,.1f} seq/s"
        f"  {values['perf/tokens_per_sec']:10,.0f} tok/s  MFU {values['perf/mfu']:6.1%}"
        f"  lr {values['train/lr']:.2e}  |g| {values['train/grad_norm']:6.3f}  ETA {duration(eta_seconds)}"
    )


def duration(seconds: float) -> str:
    """`93784` → `1d02h03m`."""
    minutes, sec = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h{minutes:02d}m"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{sec:02d}s"


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short by a kill is dropped with the steps that will be redone


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat

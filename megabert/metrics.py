"""Metrics of a run: loss, accuracy, throughput, FLOP utilisation.

They count real tokens only: padding adds neither tokens nor FLOPs. A new metric of the data is one line in `PretrainingMeter.count_work`, one of the
device (a norm, say) one line in `measured`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megabert.common.datasheets import datasheet_tflops
from megabert.common.logs import duration
from megabert.config import ModelConfig, ScheduleConfig
from megabert.optim.schedule import share_used

if TYPE_CHECKING:
    from megabert.data.batch import Update
    from megabert.distributed.ranks import World
    from megabert.engine import UpdateResult

# -- FLOPs --------------------------------------------------------------------------------------------


def attending_pairs(model: ModelConfig, lengths: np.ndarray, causal: bool) -> float:
    """Number of (query, key) pairs in sequences of these lengths [n], 0 for none, summed over the layers."""
    pairs = 0.0
    for window, layers in Counter(map(model.layer_window, range(model.layers))).items():
        reach = np.minimum(lengths - 1, window // 2) if window else lengths - 1  # most tokens on a side of a query
        pairs += layers * float((lengths + (2 - causal) * reach * (lengths - (reach + 1) / 2)).sum())
    return pairs


def training_flops(model: ModelConfig, tokens: int, pairs: int, predictions: int, sequences: int) -> float:
    """FLOPs of forward and backward over `tokens` real tokens in `sequences`, with `pairs` as of `attending_pairs`.

    6 per weight and token for the matrix products, 12·d for each pair of attending tokens, and the vocabulary product on predicted
    positions only (Kaplan et al. 2020, section 2.1, without embeddings). These are the model's: of the last layer all tokens count,
    where it computes what follows attention at predicted positions alone, 2.5 to 5% fewer in all for LARGE and BASE.
    """
    d, encoder = model.hidden, 6 * model.layer_weights * tokens
    attention = 12 * d * pairs
    heads = 6 * (model.vocab_size * d + d * d * model.transform) * predictions + 6 * d * d * sequences * model.nsp
    return float(encoder + attention + heads)


# -- metrics of updates -----------------------------------------------------------------------------------


def measured(result: UpdateResult, terms: Sequence[str]) -> dict[str, Tensor]:
    """Scalars of an update on the device, by their name in the log, without unnamed terms."""
    values = {"train/loss": result.loss}
    for term, loss, accuracy in zip(terms, result.losses, result.accuracies, strict=True):
        if term:
            values |= {f"train/{term}_loss": loss, f"train/{term}_accuracy": accuracy}
    return values | {"train/grad_norm": result.grad_norm}


def as_row(values: Mapping[str, Tensor]) -> Tensor:
    """fp32 [n] on the device."""
    return torch.stack([value.double() for value in values.values()]).float()


def update_metrics(result: UpdateResult, terms: Sequence[str]) -> dict[str, float]:
    """`measured` as floats. Waits for the device."""
    values = measured(result, terms)
    return dict(zip(values, as_row(values).tolist(), strict=True))


class Means:
    """Means of `measured` over the applied updates; the sums stay on the device until `means`."""

    def __init__(self, terms: Sequence[str], saved: Mapping[str, float] | None = None) -> None:
        """`saved`: the `state` to continue from."""
        self._terms, self._saved = terms, dict(saved or {})
        self._names: list[str] = []
        self._sums: Tensor | None = None  # fp32 [n + 1]: the sum of each value, and the number of updates

    def add(self, result: UpdateResult) -> None:
        """Add an update; a skipped one is not averaged."""
        values = measured(result, self._terms)
        row = torch.cat([as_row(values), result.applied.view(1)])
        row = row.where(result.applied > 0, 0.0)
        if self._sums is None:
            self._names = [*values, "updates"]
            if self._saved:
                row += torch.tensor([self._saved[name] for name in self._names], dtype=row.dtype, device=row.device)
        self._sums = row if self._sums is None else self._sums + row

    def state(self) -> dict[str, float]:
        """The sums, exactly. Waits for the device."""
        return self._saved if self._sums is None else dict(zip(self._names, self._sums.tolist(), strict=True))

    def means(self) -> dict[str, float]:
        """`train/…` metrics; {} where no update was applied. Waits for the device."""
        sums = self.state()
        if not sums.get("updates"):
            return {}
        names = [name for name in sums if name != "updates"]
        means = torch.tensor([sums[name] for name in names]) / torch.tensor(sums["updates"])
        return dict(zip(names, means.tolist(), strict=True))


class Meter:
    """Metrics of the updates between two log lines. Part of a checkpoint, so that a window with a restart inside is complete.

    `counts` are this rank's; `synced` adds their sums over the ranks.
    """

    def __init__(self, terms: Sequence[str]) -> None:
        """`terms`: names of the losses, "" for one that is not logged."""
        self._terms = terms
        self.seconds = 0.0
        self.counts: dict[str, int] = {}
        self.totals: dict[str, int] = {}
        # sums of the checkpoint from which the window resumed
        self._before: dict[str, int] = {}
        self.resume({})

    def count_work(self, update: Any) -> dict[str, int]:
        """Counts of this rank's part of an update, by name. Names with a section are logged: per second of training if they end in
        `_per_sec`, else as the sum since the last log line. All updates have the same names."""
        raise NotImplementedError

    def add(self, result: UpdateResult, update: Any) -> None:
        """Add an update. Metrics of a skipped update are not averaged; its counts are added."""
        for name, count in self.count_work(update).items():
            self.counts[name] = self.counts.get(name, 0) + count
        self._means.setdefault(update.objective, Means(self._terms)).add(result)

    def synced(self, seconds: float, sums: Mapping[str, int]) -> None:
        """Add the seconds of an update on the slowest rank, and the `sums` of all ranks' counts."""
        self.seconds += seconds
        self.totals = {name: count + self._before.get(name, 0) for name, count in sums.items()}

    def drain(self) -> dict[str, Any]:
        """Metrics of the window, which is reset. `train/objective` names their objective; causal updates among masked ones have
        separate metrics, `train/causal_...`."""
        seconds = max(self.seconds, 1e-9)
        values: dict[str, Any] = {}
        for objective in sorted(self._means, reverse=True):  # masked before causal
            means = self._means[objective].means()
            if values:
                values |= {name.replace("train/", f"train/{objective}_"): value for name, value in means.items()}
            elif means:
                values = means | {"train/objective": objective}
        for name, total in self.totals.items():
            if "/" in name:
                values[name] = total / seconds if name.endswith("_per_sec") else total
        self.resume({})
        return values

    def state(self) -> dict[str, Any]:
        """The window so far, of all ranks, as JSON."""
        means = {objective: of.state() for objective, of in self._means.items()}
        return {"seconds": self.seconds, "totals": self.totals, "by_objective": means}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from a `state`; {} begins a window."""
        self.seconds, self.counts = saved.get("seconds", 0.0), {}
        self.totals = self._before = dict(saved.get("totals", {}))
        means = saved.get("by_objective", {})
        self._means = {objective: Means(self._terms, sums) for objective, sums in means.items()}


class PretrainingMeter(Meter):
    """Tokens and sequences a second, and the training FLOPs as a share of the device's peak."""

    def __init__(self, world: World, model: ModelConfig, terms: Sequence[str], peak_tflops: float) -> None:
        super().__init__(terms)
        self._world, self._model, self.peak_tflops = world, model, peak_tflops
        cuda = world.device.type == "cuda"
        self._datasheet = datasheet_tflops(torch.cuda.get_device_name(world.device)) if cuda else None

    def count_work(self, update: Update) -> dict[str, int]:
        real = np.concatenate([b.lengths.numpy()[b.row_ids >= 0].ravel() for b in update.batches])  # not of fillers
        return {
            "perf/sequences_per_sec": update.sequences,
            "perf/tokens_per_sec": update.tokens,
            "perf/predictions_per_sec": update.predictions,
            "attending pairs": round(attending_pairs(self._model, real, update.objective == "causal")),
        }

    def drain(self) -> dict[str, Any]:
        flops = training_flops(
            self._model,
            tokens=self.totals["perf/tokens_per_sec"],
            pairs=self.totals["attending pairs"],
            predictions=self.totals["perf/predictions_per_sec"],
            sequences=self.totals["perf/sequences_per_sec"],
        )
        per_device = flops / max(self.seconds, 1e-9) / self._world.size / 1e12
        values = super().drain()
        values |= {"perf/tflops_per_device": per_device, "perf/mfu": per_device / self.peak_tflops}
        if self._datasheet is not None:
            values["perf/mfu_datasheet"] = per_device / self._datasheet
        return values


def first_line(objective: str, result: UpdateResult, seconds: float, interval: int) -> str:
    """The terminal's line of the first update, which took `seconds`."""
    loss = float(result.host_loss)
    return f"step       1  {objective} loss {loss:.4f}  in {seconds:.1f} s; a line every {interval} updates"


def progress_line(values: Mapping[str, Any], schedule: ScheduleConfig, objective: str, eta_seconds: float) -> str:
    """One line for the terminal: the step and the total, or the used share of a budget of tokens or minutes; the loss, and the
    accuracy of each objective."""
    accuracy = f"{objective} {values['train/mlm_accuracy']:6.2%}"
    if "train/nsp_accuracy" in values:
        accuracy += f"  NSP {values['train/nsp_accuracy']:6.2%}"
    if "train/causal_loss" in values:
        accuracy += f"  causal loss {values['train/causal_loss']:.4f} {values['train/causal_mlm_accuracy']:6.2%}"
    place = f"/{schedule.total_steps:,}"
    if schedule.unit != "steps":
        used = share_used(schedule, 0, values["time/train_seconds"] / 60, values.get("data/tokens", 0))
        minutes, tokens = f"{schedule.budget_minutes:g} minutes", f"{schedule.budget_tokens:,} tokens"
        place = f"  {used:6.1%} of {minutes if schedule.unit == 'minutes' else tokens}"
    return (
        f"step {values['step']:>7,}{place}  loss {values['train/loss']:7.4f}"
        f"  {accuracy}  {values['perf/sequences_per_sec']:8,.1f} seq/s"
        f"  {values['perf/tokens_per_sec']:10,.0f} tok/s  MFU {values['perf/mfu']:6.1%}"
        f"  lr {values['train/lr']:.2e}  |g| {values['train/grad_norm']:6.3f}  ETA {duration(eta_seconds)}"
    )

"""Figures of a run: loss, accuracy, throughput, FLOP utilisation, memory, the ranks' times; and the sinks that they go to.

Figures count real tokens only: padding adds neither tokens nor FLOPs. `metrics.jsonl` is the truth; TensorBoard, Weights &
Biases and MLflow show the same numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import resource
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megabert.common.atomic_io import write_whole
from megabert.common.logs import log
from megabert.common.run_files import METRICS, SAMPLES, SINK_IDS
from megabert.common.text import duration
from megabert.config import Config, ModelConfig

if TYPE_CHECKING:
    from megabert.data.batch import Update
    from megabert.distributed.process_group import World
    from megabert.engine import Engine, UpdateResult


# Dense 16-bit tensor-core TFLOP/s with fp32 accumulation, of NVIDIA's datasheets (which print sparse figures, twice these,
# from A100 on); the first pattern that is in `torch.cuda.get_device_name()` counts. V100 has fp16 only.
DATASHEET_TFLOPS = {
    r"\bGB200\b": 2500.0,  # GB200 NVL72 datasheet, a GPU
    r"\bB200\b": 2250.0,  # HGX B200 datasheet
    r"\bH100 PCIe\b": 756.0,  # H100 datasheet, 2022
    r"\bH100 NVL\b": 835.5,  # H100 datasheet, 2024
    r"\b(H100|H200|GH200)\b": 989.0,  # H100 SXM, H200 and GH200 datasheets
    r"\bA100\b": 312.0,  # A100 datasheet, SXM and PCIe
    r"\bL40S\b": 362.0,  # L40S datasheet
    r"\bRTX 4090\b": 165.2,  # NVIDIA Ada GPU architecture, appendix A
    r"\bV100-PCIE\b": 112.0,  # V100 datasheet
    r"\bV100\b": 125.0,  # V100 datasheet, SXM2
}


def datasheet_tflops(device_name: str) -> float | None:
    """Dense bf16 (V100: fp16) peak of a GPU in TFLOP/s by its datasheet, None where it is not in the table."""
    return next((peak for name, peak in DATASHEET_TFLOPS.items() if re.search(name, device_name)), None)


def attending_pairs(squares: float, tokens: float, causal: bool) -> float:
    """How many (query, key) pairs sequences have whose lengths sum to `tokens` and their squares to `squares`."""
    return (squares + tokens) / 2 if causal else squares


def training_flops(model: ModelConfig, tokens: int, pairs: int, predictions: int, sequences: int) -> float:
    """FLOPs of forward and backward over `tokens` real tokens in `sequences`, with `pairs` of a query and a key.

    6 per weight and token for the matrix products, 12·d a layer for each pair of attending tokens, and the vocabulary
    product on predicted positions only (Kaplan et al. 2020, section 2.1, without embeddings).
    """
    d, ffn = model.hidden, model.ffn
    encoder = 6 * model.layers * (4 * d * d + d * (model.ffn_inputs + ffn)) * tokens
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


SLOWER = 1.08  # times the median of the ranks: a rank that is 10% slower is named in spite of noise
UPDATES = 50  # for so many updates


class Straggler(NamedTuple):
    """A rank and its time in times of the median, of which `waits` for data."""

    rank: int
    ratio: float
    waits: float


class Stragglers:
    """Ranks that took `SLOWER` times the median of all ranks over the last `UPDATES` updates."""

    def __init__(self) -> None:
        self._windows: deque[tuple[int, np.ndarray]] = deque()  # updates, seconds [2, ranks]
        self.named: dict[int, Straggler] = {}

    def add(self, updates: int, compute: Sequence[float], wait: Sequence[float]) -> list[Straggler]:
        """The seconds of each rank in so many more updates; the stragglers that were none before."""
        self._windows.append((updates, np.array([compute, wait])))
        while sum(its for its, _ in self._windows) - self._windows[0][0] >= UPDATES:
            self._windows.popleft()
        if sum(its for its, _ in self._windows) < UPDATES:
            return []
        parts = np.sum([seconds for _, seconds in self._windows], axis=0)
        total = parts.sum(axis=0)
        middle = median(total)
        before, self.named = self.named, {}
        for rank in np.flatnonzero(total >= SLOWER * middle).tolist():
            if middle > 0:
                share = parts[1, rank] / total[rank]
                self.named[rank] = Straggler(rank, float(total[rank] / middle), float(share))
        return [found for rank, found in self.named.items() if rank not in before]


class RankFigures:
    """This rank's times since the last log line and its memory, and what comes of those of all ranks."""

    def __init__(self, world: World, engine: Engine) -> None:
        self._world, self._own = world, engine.own_time
        self._waited, self._updates = 0.0, 0
        self.stragglers = Stragglers()

    def take(self, updates: Any) -> Any:
        """The next update, with the time that the host waits for it."""
        asked = time.perf_counter()
        update = next(updates)
        self._waited += time.perf_counter() - asked
        self._updates += 1
        return update

    @property
    def counts(self) -> list[int]:
        """This rank's part of what `drain` takes summed over the ranks: bytes and nanoseconds."""
        memory = round(peak_memory_gib(self._world.device) * 2**30)
        values = (memory, round(self._own.seconds() * 1e9), round(self._waited * 1e9))
        return [slot for value in values for slot in self._world.slots(value)]

    def drain(self, sums: Sequence[int]) -> dict[str, Any]:
        """`perf/…` values of the updates since the last call, lists by rank; a new straggler is warned of. A collective."""
        size, updates = self._world.size, max(self._updates, 1)
        memory, own, waited = (sums[first : first + size] for first in range(0, 3 * size, size))
        compute, wait = [value / 1e9 for value in own], [value / 1e9 for value in waited]
        found = self.stragglers.add(self._updates, compute, wait) if size > 1 and self._updates else []
        self._own.reset()
        self._waited, self._updates = 0.0, 0
        values: dict[str, Any] = {
            "perf/peak_memory_gib": round(max(memory) / 2**30, 4),
            "perf/rank_compute_seconds": [round(value / updates, 6) for value in compute],
            "perf/rank_data_wait_seconds": [round(value / updates, 6) for value in wait],
        }
        if size > 1:
            total = [c + w for c, w in zip(compute, wait, strict=True)]
            slowest = max(range(size), key=total.__getitem__)
            values["perf/slowest_rank"] = slowest
            values["perf/slowest_rank_ratio"] = round(total[slowest] / max(median(total), 1e-9), 4)
            values["perf/stragglers"] = sorted(self.stragglers.named)
            self._warn(found)
        return values

    def _warn(self, stragglers: Sequence[Straggler]) -> None:
        hosts = self._world.gather(socket.gethostname()) if stragglers else []
        for slow in stragglers if self._world.is_main else ():
            log.warning(
                f"rank {slow.rank} (host {hosts[slow.rank]}) is slow: {slow.ratio:.2f} times the median of the ranks over "
                f"the last {UPDATES} updates, {slow.waits:.0%} of it waiting for data"
            )


def median(values: Iterable[float]) -> float:
    """The lower median: of two ranks the faster one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


CURVES = 64  # of as many ranks each has its own
PACKAGES = ("wandb", "mlflow")  # optional ones, by their settings
PARAMETERS_AT_ONCE = 100  # that MLflow takes
# seconds and further tries, unless the user sets them: training waits meanwhile, MLflow's own take longer than the watchdog does
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


@dataclass(frozen=True)
class Shown:
    """What an evaluation looked at besides its figures.

    `samples` as of `megabert.evaluation`. `curves` are of precision and recall: for each label, whether an example has
    it (bool [n]) and how probable the model holds that (float [n]).
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def as_json(values: dict[str, Any]) -> str:
    """One line of JSON; what JSON has no number for is written as text."""
    return json.dumps({key: _finite(value) for key, value in values.items()})


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Sink:
    """What takes the figures of a run; each kind takes what it can show."""

    def write(self, values: dict[str, Any]) -> None:
        """Figures, and the "step" they are of."""

    def show(self, step: int, shown: Shown) -> None:
        """What an evaluation looked at."""

    def conclude(self, results: Mapping[str, float]) -> None:
        """The final figures."""

    def close(self) -> None:
        """Nothing more is to come."""


class JsonLines(Sink):
    """One object a line, each with its step. Lines past the step a run resumes from are cut."""

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


class SampleLines(Sink):
    """`samples.jsonl`: the samples of each evaluation; there is no file before the first one."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path, self._resume_step = path, resume_step
        self._lines = JsonLines(path, resume_step) if path.exists() else None

    def show(self, step: int, shown: Shown) -> None:
        if shown.samples:
            self._lines = self._lines or JsonLines(self._path, self._resume_step)
            self._lines.write({"step": step, "samples": shown.samples})

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


class TensorBoard(Sink):
    """Scalars, samples and the resolved config as text, curves of precision and recall, hparams with the final evaluation."""

    def __init__(self, folder: Path, config: Config, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)
        self._config = config
        text = json.dumps(config.model_dump(), indent=2)
        self._writer.add_text("config", f"```json\n{text}\n```", resume_step)

    def write(self, values: dict[str, Any]) -> None:
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, values["step"])
        for name, value in values.items():
            if isinstance(value, list) and name.startswith("perf/rank_"):
                self._ranks(name, value, values["step"])

    def _ranks(self, name: str, values: list[float], step: int) -> None:
        """A curve a rank, or of many ranks their histogram."""
        if len(values) > CURVES:
            self._writer.add_histogram(name, np.array(values), step)
            return
        for rank, value in enumerate(values):
            self._writer.add_scalar(f"{name}/{rank:02}", value, step)

    def show(self, step: int, shown: Shown) -> None:
        if shown.samples:
            self._writer.add_text("samples", as_markdown(shown.samples), step)
        for label, (truth, probabilities) in shown.curves.items():
            self._writer.add_pr_curve(f"dev/precision_recall/{label}", truth, probabilities, step)

    def conclude(self, results: Mapping[str, float]) -> None:
        flat = _flatten(self._config.model_dump())
        self._writer.add_hparams(flat, {f"final/{k.split('/')[-1]}": v for k, v in results.items()}, run_name="hparams")

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """A run of the project `log.wandb`, the same one after a restart. WANDB_MODE=offline keeps it in the run's folder."""

    def __init__(self, folder: Path, config: Config, fresh: bool) -> None:
        """`fresh`: the run begins. Raises ValueError where Weights & Biases refuses."""
        wandb: Any = importlib.import_module("wandb")
        self._wandb = wandb
        name = _kept_name(folder, "wandb", fresh) or secrets.token_hex(8)
        try:
            self._run = wandb.init(
                project=config.log.wandb,
                id=name,
                name=folder.resolve().name,
                dir=str(folder),
                config=config.model_dump(),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"log.wandb={config.log.wandb}: {' '.join(str(error).split())}; `wandb login`, or WANDB_MODE=offline"
            ) from None
        self._run.define_metric("*", step_metric="step")  # steps that are done again come again
        _keep_name(folder, "wandb", name)

    def write(self, values: dict[str, Any]) -> None:
        self._run.log({"step": values["step"]} | _numbers(values))

    def conclude(self, results: Mapping[str, float]) -> None:
        self._run.summary.update({f"final/{name.split('/')[-1]}": value for name, value in results.items()})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its process takes no second run of one id, as after a rollback


class MLflow(Sink):
    """A run of the experiment `log.mlflow`, the same one after a restart, at MLFLOW_TRACKING_URI or in the run's own folder.

    A server that does not answer later on ends what is sent to it, not the training.
    """

    def __init__(self, folder: Path, config: Config, fresh: bool) -> None:
        """`fresh`: the run begins. Raises ValueError where the server refuses a run that is new there."""
        for name, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        self._mlflow: Any = importlib.import_module("mlflow")
        place, own = os.environ.get("MLFLOW_TRACKING_URI", ""), folder.resolve()
        self._silent = False
        known = _kept_name(folder, "mlflow", fresh)
        try:
            self._client = self._mlflow.MlflowClient(place or f"sqlite:///{own}/mlflow.db")
            self._name = known or self._begin(config, own, bool(place))
        except self._mlflow.exceptions.MlflowException as error:
            raise ValueError(f"log.mlflow={config.log.mlflow}: {' '.join(str(error).split())}") from None
        _keep_name(folder, "mlflow", self._name)
        if known:
            self._tell(lambda: self._client.set_terminated(known, "RUNNING"))

    def _begin(self, config: Config, folder: Path, elsewhere: bool) -> str:
        """A new run with its settings; its id."""
        found = self._client.get_experiment_by_name(config.log.mlflow)
        own = None if elsewhere else (folder / "mlartifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(config.log.mlflow, own)
        run: str = self._client.create_run(experiment, run_name=folder.name).info.run_id
        of = self._mlflow.entities.Param
        settings = [of(name, str(value)) for name, value in _flatten(config.model_dump()).items()]
        for first in range(0, len(settings), PARAMETERS_AT_ONCE):
            self._client.log_batch(run, params=settings[first : first + PARAMETERS_AT_ONCE])
        return run

    def _tell(self, call: Callable[[], None]) -> None:
        """Call the server, unless it has failed before; a failure is warned of once."""
        if self._silent:
            return
        try:
            call()
        except self._mlflow.exceptions.MlflowException as error:
            self._silent = True
            log.warning(f"mlflow: {' '.join(str(error).split())}; no more is sent to it until the next start")

    def _send(self, values: Mapping[str, float], step: int) -> None:
        now, of = int(time.time() * 1000), self._mlflow.entities.Metric
        metrics = [of(name, value, now, step) for name, value in values.items()]
        self._tell(lambda: self._client.log_batch(self._name, metrics))

    def write(self, values: dict[str, Any]) -> None:
        self._send(_numbers(values), values["step"])

    def conclude(self, results: Mapping[str, float]) -> None:
        self._send({f"final/{name.split('/')[-1]}": value for name, value in results.items()}, 0)

    def close(self) -> None:
        self._tell(lambda: self._client.set_terminated(self._name))


def as_markdown(samples: Iterable[dict[str, Any]]) -> str:
    """The samples as a text of TensorBoard: each with its masks numbered, and under it what is said for each."""
    lines = []
    for sample in samples:
        tokens = list(sample["tokens"])
        for number, mask in enumerate(sample["masks"], 1):
            tokens[mask["at"]] = f" **[{number}]**"
        lines += ["".join(map(_plain, tokens)).strip(), ""]
        for number, mask in enumerate(sample["masks"], 1):
            said = ", ".join(f"{_plain(word)} {p:.0%}" for word, p in mask["said"])
            lines.append(f"{number}. **{_plain(sample['tokens'][mask['at']])}**: {said}")
        lines.append("")
    return "\n".join(lines)


def _plain(piece: str) -> str:
    """A piece that Markdown shows as it is."""
    kept = piece if piece.isprintable() else ascii(piece)
    return kept if kept.startswith(" **[") else "".join(f"\\{c}" if c in "\\`*_[]<>#|" else c for c in kept)


class Sinks:
    """All sinks of a run; without a folder there are none."""

    def __init__(self, folder: Path | None, config: Config, step: int, saved_step: int) -> None:
        """Goes on from `step`; `saved_step` is that of the newest checkpoint, -1 where there is none. Raises ValueError
        where one that is asked for cannot be had."""
        self._sinks: list[Sink] = []
        if folder is None:
            return
        fresh = saved_step < 0
        if config.log.wandb:
            self._sinks.append(WeightsAndBiases(folder, config, fresh))
        if config.log.mlflow:
            self._sinks.append(MLflow(folder, config, fresh))
        self._sinks += [JsonLines(folder / METRICS, saved_step), SampleLines(folder / SAMPLES, saved_step)]
        if config.log.tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard", config, step))

    def write(self, values: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(values)

    def show(self, step: int, shown: Shown) -> None:
        """What the evaluation at `step` looked at."""
        for sink in self._sinks:
            sink.show(step, shown)

    def hparams(self, results: Mapping[str, float]) -> None:
        """The run's settings with what came of it, where a sink shows them together."""
        for sink in self._sinks if results else ():
            sink.conclude(results)

    def close(self) -> None:
        """Each of them, also where another one fails, whose error is raised then."""
        with ExitStack() as all_of_them:
            for sink in reversed(self._sinks):
                all_of_them.callback(sink.close)


def check_packages(config: Config) -> None:
    """Raises ValueError naming a setting whose package is not installed."""
    for name in PACKAGES:
        setting = getattr(config.log, name)
        if setting and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"log.{name}={setting}: {name} is not installed; pip install 'megabert[{name}]', or remove the setting"
            )


def _names(folder: Path) -> dict[str, str]:
    """Under which ids the run is known elsewhere; what cannot be read is as if it were not there."""
    try:
        found = json.loads((folder / SINK_IDS).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _kept_name(folder: Path, sink: str, fresh: bool) -> str:
    """The run's id at a sink; "" where it begins, or had none."""
    return "" if fresh else _names(folder).get(sink, "")


def _keep_name(folder: Path, sink: str, name: str) -> None:
    write_whole(folder / SINK_IDS, (json.dumps(_names(folder) | {sink: name}) + "\n").encode())


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line: what has a section in its name and is a number."""
    return {name: value for name, value in values.items() if "/" in name and isinstance(value, int | float)}


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short by a kill is dropped with the steps that will be redone


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat

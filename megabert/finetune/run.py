"""Fine-tuning runs in their folders: encoded files, the Trainer's workload, evaluations, the best weights, the summary of runs.

A run's settings and files determine its weights bit for bit, also after interruptions. An epoch has every item once, in an order
that is a function of (seed, epoch); the learning rate warms up and falls linearly. After every epoch the dev set is scored, a
checkpoint is started, and the best weights are kept. A command with other settings is refused, one that adds seeds, or
learning rates to several, resumes.

    OUTPUT/settings.json            settings common to all runs
    OUTPUT/summary.json             the last command, its learning rates and runs
    OUTPUT/RUN/best/                the best weights (`megabert.finetune.save`)
    OUTPUT/RUN/predictions-dev.*    and predictions-test.*, by the best weights; labels-*.tsv, scores by label
    OUTPUT/RUN/metrics.jsonl        and tensorboard/, as in pre-training
    OUTPUT/RUN/result.json          written last: the run is finished
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from megabert import config as configuration
from megabert import hf
from megabert.checkpoint import Checkpoints, run_lock
from megabert.common import tables
from megabert.common.arguments import parse_layers
from megabert.common.errors import OK, USER_ERROR
from megabert.common.files import hash_file, write_atomically
from megabert.common.logs import aligned, duration, hide_secrets, log
from megabert.config import Config, WatchdogConfig
from megabert.data.batch import Update
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.ranks import RankError, World, check_same, on_main
from megabert.distributed.session import Session
from megabert.distributed.signals import REQUEUE, Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import DTYPES, Engine, precision
from megabert.finetune import encoding, heads, save, scores
from megabert.finetune.batches import steps_per_epoch, updates
from megabert.finetune.encoding import TaskEncoding, TaskItem
from megabert.finetune.files import Example
from megabert.finetune.prediction import compute_logits
from megabert.finetune.save import Described
from megabert.finetune.settings import Settings, list_runs
from megabert.finetune.tasks import Task, find, goodness
from megabert.hf import Pretrained, mapping
from megabert.hf.unknown_tokens import UnknownTokens
from megabert.metrics import Meter
from megabert.trainer import Trainer

COMMON, SUMMARY, RESULT = "settings.json", "summary.json", "result.json"


def configure(model: Config, settings: Settings, items: int, world_size: int, log_interval: int = 20) -> Config:
    """The engine's config for `items` training items, with default backends of the device. Raises ValueError naming an option that
    does not fit."""
    if settings.max_length > model.model.max_positions:
        raise ValueError(f"--max-length {settings.max_length}: the model has {model.model.max_positions} positions")
    share = settings.batch // world_size
    if settings.batch % world_size:
        raise ValueError(f"--batch {settings.batch} cannot be split evenly over {world_size} ranks")
    micro = min(settings.micro_batch or share, share)
    if share % micro:
        raise ValueError(f"--micro-batch {micro} does not divide a rank's {share} items of --batch")
    parse_layers(settings.layers, model.model.layers)
    total = settings.epochs * steps_per_epoch(items, settings.batch)
    dropout = {"dropout": settings.dropout, "attention_dropout": settings.dropout}
    return configuration.from_dict(
        {
            "seed": settings.seed,
            "precision": settings.precision,
            "model": model.model.model_dump() | dropout,
            "data": {"masking": model.data.masking.model_dump()},
            "batch": {"global_size": settings.batch, "micro_size": micro},
            "optimizer": {"lr": settings.lr, "weight_decay": settings.weight_decay},
            "schedule": {"total_steps": total, "warmup_steps": math.ceil(settings.warmup * total)},
            "zero": {"stage": settings.zero},
            "checkpoint": {"keep": 1},
            "log": {"interval": log_interval},
            # Losses of a task's small batches vary too much for a spike policy.
            "spikes": {"policy": "off"},
        }
    )


# ---- data


@dataclass(frozen=True)
class Data:
    """A task with its encoded files by split: "train", "dev" and others to predict."""

    task: Task
    labels: tuple[str, ...]
    examples: dict[str, Sequence[Example]]
    items: dict[str, list[TaskItem]]

    def run_name(self, folder: Path) -> str:
        """Name of a run in log lines."""
        return folder.name if self.task.name == "custom" else f"{self.task.name}/{folder.name}"


def encode_splits(
    task: Task,
    examples: Mapping[str, Sequence[Example]],
    tokenizer: Tokenizer,
    settings: Settings,
    limit: int = 0,
    separators: int = 1,
) -> Data:
    """The first `limit` examples of each split (0: all), truncated by `settings`. Labels are those of the whole "train" file.
    `separators` as of `TaskEncoding`.

    Raises ValueError naming file and line of another label.
    """
    labels = encoding.collect_labels(task, examples["train"])
    examples = {name: part[: limit or None] for name, part in examples.items()}
    every_token = encoding.tags_every_token(task, labels)
    how = settings.max_length, settings.stride, every_token, separators
    items_of = TaskEncoding(task, tokenizer, labels, *how)
    items = {name: items_of.encode(part) for name, part in examples.items()}
    for name, part in items.items():
        UnknownTokens(tokenizer).add(item.ids for item in part).warn(f"the {name} file")
        truncated = encoding.count_truncated(part)
        encoding.warn_truncated(f"the {name} file", task, settings.max_length, truncated, len(examples[name]))
    if labels:
        log.info(f"labels: {encoding.describe_labels(task, labels)}")
    return Data(task, labels, examples, items)


def describe(data: Data, start: Pretrained, settings: Settings, world_size: int, log_interval: int = 20) -> Described:
    """The model of a run. Raises ValueError naming an option that does not fit."""
    config = configure(start.config, settings, len(data.items["train"]), world_size, log_interval)
    last = parse_layers(settings.layers, config.model.layers) == [config.model.layers]
    layers = "last" if last else settings.layers
    every_token = encoding.tags_every_token(data.task, data.labels)
    lengths, separators = (settings.max_length, settings.stride), mapping.pair_separators(config.model)
    return Described(
        data.task, data.labels, *lengths, config, layers=layers, every_token=every_token, separators=separators
    )


# ---- the run


class TaskMeter(Meter):
    """Items and tokens a second, loss and accuracy, between two log lines."""

    def count_work(self, update: Any) -> dict[str, int]:
        items = sum(batch.items for batch in update.batches)
        return {"perf/items_per_sec": items, "perf/tokens_per_sec": update.tokens}

    def drain(self) -> dict[str, Any]:
        values = super().drain()
        (kind,) = self._terms
        values.pop(f"train/{kind}_loss", None)  # is the loss
        accuracy = values.pop(f"train/{kind}_accuracy", None)
        return values if accuracy is None or kind == "score" else values | {"train/accuracy": accuracy}


class FineTuning:
    """One run in its folder; `train` returns its result, or None if it was stopped and has saved."""

    samples = ()

    def __init__(
        self, folder: Path, data: Data, start: Pretrained, settings: Settings, world: World, log_interval: int = 20
    ) -> None:
        """`start`: model, weights (unless from scratch) and tokenizer. `log_interval`: updates between log lines."""
        self.folder, self.name, self.data, self.start = folder, data.run_name(folder), data, start
        self.settings, self.world = settings, world
        self.metric = data.task.metrics[0]
        self.described = describe(data, start, settings, world.size, log_interval)
        self.config = self.described.config
        torch.manual_seed(settings.seed)
        weights = None if settings.from_scratch else start.trained_weights
        kind, outputs, dtype = data.task.kind, self.described.outputs, DTYPES[self.config.precision]
        self.module: Any = heads.build(self.config, kind, outputs, weights, world.device, dtype, self.described.layers)
        self.frozen = self.module.freeze(world.device, dtype) if settings.freeze else {}
        self.engine = Engine(self.config, self.module, world)
        self.meter = TaskMeter(self.engine.terms)
        # the best evaluation so far: its step (-1: none yet) and its scores on dev
        self.best: dict[str, Any] = {"step": -1, "scores": {}}
        self.per_epoch = steps_per_epoch(len(data.items["train"]), settings.batch)

    def train(self, stop: Stop, watchdog: Watchdog) -> dict[str, Any] | None:
        """Train from the newest checkpoint, or from the start. Raises BadTraining."""
        if self.world.is_main:
            self.folder.mkdir(exist_ok=True)
        checkpoints = Checkpoints(self.folder, self.world, self.config.checkpoint)
        path, saved = checkpoints.latest(), None
        if path is not None:
            refuse_other_rate(self.folder, checkpoints.state["config"]["optimizer"]["lr"], self.settings.lr)
            saved = checkpoints.load(self.engine, path)
            log.info(f"{self.name}  resuming at step {saved['step']}")
        trainer = Trainer(
            config=self.config,
            engine=self.engine,
            workload=self,
            checkpoints=checkpoints,
            stop=stop,
            watchdog=watchdog,
            provenance={"config": self.config.model_dump()},
            saved=saved,
        )
        try:
            return self.conclude(trainer) if trainer.train() else None
        finally:
            trainer.close()

    def conclude(self, trainer: Trainer) -> dict[str, Any]:
        """Write predictions and scores of the best weights, which finishes the run. A collective."""
        # Rank 0 has written the best weights.
        self.world.barrier()
        best = save.load(self.folder / "best", self.world.device)
        scores_by_split: dict[str, dict[str, float]] = {}
        for split in sorted(self.data.items.keys() - {"train"}):
            judged = self.judge(best.module, split, trainer.watchdog.progress, best.described.threshold)
            scores_by_split[split], predictions, _ = judged
            if self.world.is_main:
                self.write_predictions(split, predictions)
        result = {
            "name": self.folder.name,
            "settings": asdict(self.settings),
            "scores": scores_by_split,
            "best_step": self.best["step"],
            "steps": trainer.state.step,
            "items": len(self.data.items["train"]),
            "seconds": round(trainer.state.seconds, 3),
        }
        trainer.sinks.hparams({f"dev/{name}": value for name, value in scores_by_split["dev"].items()})
        if self.world.is_main:
            write_json(self.folder / RESULT, result)
            shutil.rmtree(trainer.checkpoints.folder, ignore_errors=True)
        return result

    def write_predictions(self, split: str, predictions: Sequence[Any]) -> None:
        """Write the predictions of a split, and its scores by label if it has labels."""
        task, examples = self.data.task, self.data.examples[split]
        path = self.folder / f"predictions-{split}.{scores.suffix(task, examples)}"
        scores.write(task, [(examples, predictions)], path)
        if rows := scores.by_label(task, examples, predictions, self.data.labels):
            lines = [f"{name}\t{p:.4f}\t{r:.4f}\t{f1:.4f}\t{support}\n" for name, p, r, f1, support in rows]
            head = "label\tprecision\trecall\tf1\tsupport\n"
            write_atomically(self.folder / f"labels-{split}.tsv", (head + "".join(lines)).encode())

    def judge(
        self, module: heads.Finetuner, split: str, progress: Callable[[], None], threshold: float | None = None
    ) -> tuple[dict[str, float], list[Any], float]:
        """A split's scores and predictions, and the threshold, which is chosen by the settings unless given; on every rank. A
        collective."""
        task, labels = self.data.task, self.data.labels
        examples, items = self.data.examples[split], self.data.items[split]
        logits = compute_logits(module, items, self.described.layout, self.world, progress=progress)
        if threshold is None and self.settings.threshold == "f1":
            scores.refuse_non_finite(examples, items, logits)
            threshold = scores.best_threshold(scores.collect_truth(task, examples), logits, labels)
        threshold = 0.5 if threshold is None else threshold
        predictions = scores.decode(task, examples, items, logits, labels, threshold)
        return scores.score(task, examples, predictions, labels, logits), predictions, threshold

    # -- the Trainer's workload --------------------------------------------------------------------------------------

    def updates(self, first: int, phase_starts: Sequence[int]) -> Iterator[Update]:
        items, layout, micro_steps = self.data.items["train"], self.described.layout, self.engine.accumulation
        return updates(items, layout, self.settings, self.world, micro_steps, first)

    def evaluation_due(self, step: int) -> bool:
        return step > 0 and step % self.per_epoch == 0

    checkpoint_due = evaluation_due

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Score the dev set, and keep the best weights. A collective."""
        dev_scores, _, threshold = self.judge(self.module, "dev", progress)
        value, best = (goodness(self.metric, of.get(self.metric, math.nan)) for of in (dev_scores, self.best["scores"]))
        better = self.best["step"] < 0 or value > best
        shown = "  ".join(f"{name} {v:.4f}" for name, v in dev_scores.items())
        epoch = f"epoch {step // self.per_epoch} of {self.settings.epochs}"
        log.info(f"{self.name}  step {step:>6,}  {epoch}  dev  {shown}{'  (best so far)' if better else ''}")
        if better:
            self.best = {"step": step, "scores": dev_scores}
            weights = self.engine.consolidated_weights()
            if self.world.is_main:
                results = {"step": step, "dev": dev_scores, "settings": asdict(self.settings)}
                described = replace(self.described, threshold=threshold)
                save.save(self.folder / "best", described, self.frozen | weights, self.start.tokenizer, results)
        return {f"dev/{name}": v for name, v in dev_scores.items()}

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        total = self.config.schedule.total_steps
        accuracy = f"  accuracy {values['train/accuracy']:6.2%}" if "train/accuracy" in values else ""
        return (
            f"{self.name}  step {values['step']:>6,}/{total:,}  {values['step'] / total:4.0%}"
            f"  loss {values['train/loss']:7.4f}{accuracy}  {values['perf/items_per_sec']:7,.1f} items/s"
            f"  {values['perf/tokens_per_sec']:8,.0f} tok/s  lr {values['train/lr']:.2e}  ETA {duration(eta_seconds)}"
        )

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    def resume(self, saved: Mapping[str, Any]) -> None:
        self.best = saved["best"]


def write_json(path: Path, tree: Any) -> None:
    """Write the file atomically."""
    write_atomically(path, (json.dumps(tree, indent=1) + "\n").encode())


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError naming a damaged one and what to do."""
    try:
        tree = json.loads(path.read_bytes())
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: is damaged; {advice}")
    return tree


# ---- the commands

# A task, its files by split, and the folder of its runs.
TaskFiles = tuple[Task, dict[str, Path], Path]
# One run in its folder; returns its result, or None if it was stopped.
Train = Callable[[Path, Data, Settings], dict[str, Any] | None]


def train_tasks(
    args: argparse.Namespace,
    ranks: Session,
    tasks: Sequence[TaskFiles],
    read: Callable[[Task, Mapping[str, Path]], dict[str, list[Any]]],
    show: Callable[[Mapping[str, Any]], str],
) -> int:
    """Train the runs of each task that have no result; returns the exit code. `read` returns a task's splits, `show` the page to
    print after its summary. Raises ValueError for mistakes, before anything is written."""
    stop, world, output = ranks.join(), ranks.world, Path(args.output)
    saved = on_main(world, lambda: saved_precision([folder for *_, folder in tasks]))
    args.precision = precision.choose(args.precision, world, saved)
    start, (first, *_) = load_start(args.model, args.tokenizer), tasks[0]
    model = start.config.model
    runs = list_runs(args, min(first.max_length, model.max_positions), first.stride, model.hidden)
    settings, limit = next(iter(runs.values())), args.limit

    def check(task: Task, files: Mapping[str, Path], folder: Path) -> dict[str, Any]:
        """The common settings of a task's runs. Raises ValueError for mistakes."""
        examples = read(task, files)["train"]
        configure(start.config, settings, len(examples[: limit or None]), world.size)
        labels = encoding.collect_labels(task, examples)
        if settings.threshold != "half" and (task.kind != "classify" or len(labels) != 2):
            raise ValueError(
                f"--threshold {settings.threshold}: is of two labels, {task.name} is {task.kind} of {len(labels)}"
            )
        common = common_settings(task, labels, start, files, settings, limit)
        on_main(world, lambda: refuse(folder, common))
        return common

    def train(folder: Path, data: Data, settings: Settings) -> dict[str, Any] | None:
        assert ranks.watchdog is not None
        return FineTuning(folder, data, start, settings, world, args.log_interval).train(stop, ranks.watchdog)

    page, commons = "", [check(*given) for given in tasks]
    for (task, files, folder), common in zip(tasks, commons, strict=True):
        separators = mapping.pair_separators(model)
        data = encode_splits(task, read(task, files), start.tokenizer, settings, limit, separators)
        for name, part in data.examples.items():
            log.info(f"{name}: {len(part):,} examples, {len(data.items[name]):,} items")
        check_same(world, common)
        claim(folder, common, world)
        watchdog = ranks.watchdog or ranks.watch(output, WatchdogConfig().timeout_seconds)
        ranks.errors_may_differ = True
        watchdog.progress()
        summary = train_missing(folder, common, data, runs, world, train)
        if summary is None:
            return REQUEUE
        page = show(summary) if world.is_main else ""
    log.info(page)
    return OK


def saved_precision(folders: Sequence[Path]) -> str:
    """That of the runs in the first of `folders` that has any, also if they began on another device; "" without."""
    paths = (folder / COMMON for folder in folders)
    return next((read_json(path, "name another --output").get("precision", "") for path in paths if path.is_file()), "")


def load_start(source: str, tokenizer: str) -> Pretrained:
    """The model to fine-tune, also of a fine-tuned one; logs what of it is not used. Errors as of `hf.load`."""
    folder = hf.model_folder(source)
    if find(folder) is None:
        start = hf.load(folder, tokenizer)
        if start.ignored:
            log.info(f"{source}: its encoder is used, and these of its tensors are not: {start.left_out}")
        return start
    if tokenizer:
        raise ValueError(f"--tokenizer: {source} is a fine-tuned model, which has its own")
    found = save.load(folder, torch.device("cpu"), "fp32")
    log.info(f"{source}: fine-tuned for {found.described.task.name}: its encoder is used, its head is not")
    return save.base(found)


# ---- the runs of a folder


def common_settings(
    task: Task, labels: Sequence[str], start: Pretrained, files: Mapping[str, Path], settings: Settings, limit: int
) -> dict[str, Any]:
    """Values common to all runs of a folder that affect their results: model, task, files, and settings."""
    digests = {name: [hash_file(part) for part in tables.files(path)] for name, path in files.items()}
    plain = {name: value for name, value in asdict(settings).items() if name not in ("seed", "lr")}
    separators = mapping.pair_separators(start.config.model)
    return {
        "model_sha256": hf.fingerprint(start.trained_weights),
        "tokenizer_sha256": start.tokenizer.sha256,
        "task": task.name,
        "kind": task.kind,
        "text": list(task.text),
        "label": task.label,
        "id": task.id,
        "labels": list(labels),
        "metrics": list(task.metrics),
        "files_sha256": digests,
        "limit": limit,
        # an earlier version always had one
        **({"separators": separators} if separators > 1 and (task.pair or task.kind == "span") else {}),
        **plain,
    }


def refuse(output: Path, common: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting in which the runs of `output` differ from `common`, a foreign file in the folder, or
    a file in its place. An empty or missing folder passes, as one with hidden files alone, such as a killed process leaves."""
    path = output / COMMON
    if file := next((place for place in (output, output.parent) if place.is_file()), None):
        raise ValueError(f"{file}: is a file; name a folder as --output")
    if path.is_file():
        there = read_json(path, "name another --output")
        # An earlier version may not have had all settings.
        usual = {each.name: each.default for each in fields(Settings)}
        usual |= {"tokenizer_sha256": common.get("tokenizer_sha256"), "id": ""}
        for name in {**common, **there}:
            before, now = (values.get(name, usual.get(name)) for values in (there, common))
            if before == now:
                continue
            said = f"{name}={before!r}, this command says {now!r}"
            if name == "files_sha256":  # digests do not say which file it is
                split = next(split for split in {**now, **before} if before.get(split) != now.get(split))
                said = f"{'another' if split in before else 'no'} {split} file"
            raise ValueError(f"{output}: was made with {said}; name another --output")
    elif others := sorted(entry.name for entry in output.glob("[!.]*") if entry.name != "lock"):
        raise ValueError(f"{output}: holds {others[0]} and no {COMMON}; name an empty folder as --output")


def claim(output: Path, common: Mapping[str, Any], world: World) -> None:
    """Lock `output` and write the common settings. A collective. Errors as of `refuse`, before anything is written."""

    def write() -> None:
        refuse(output, common)
        write_json(output / COMMON, common)

    on_main(world, lambda: refuse(output, common))
    run_lock.acquire(output, world)
    on_main(world, write)


def refuse_other_rate(folder: Path, trained: float, given: float) -> None:
    """Raises RankError, on every rank, if the run in `folder`, whose name may lack the rate, was trained at another one
    than `given`."""
    if trained != given:
        raise RankError(
            f"{folder}: was trained at --lr {trained}, this command says {given}; name another --output", USER_ERROR
        )


def train_missing(
    output: Path, common: Mapping[str, Any], data: Data, runs: Mapping[str, Settings], world: World, train: Train
) -> dict[str, Any] | None:
    """`train` those of `runs` (settings by name) of a claimed folder that have no result, and return the summary; None if stopped and
    saved. A collective. Raises as `refuse_other_rate`."""
    results: list[dict[str, Any]] = []
    for number, (name, settings) in enumerate(runs.items(), 1):
        path = output / name / RESULT
        advice = f"remove {path.parent} to train it again"
        result = on_main(world, lambda: read_json(path, advice) if path.is_file() else None)  # noqa: B023
        if result is not None:
            refuse_other_rate(path.parent, result["settings"]["lr"], settings.lr)
            if world.is_main:  # those of a run that was killed while they were removed
                shutil.rmtree(path.parent / "checkpoints", ignore_errors=True)
        else:
            log.info(
                f"{data.run_name(output / name)}: run {number} of {len(runs)}, {settings.epochs} epochs at rate {settings.lr:g}"
            )
            result = train(output / name, data, settings)
            # DeepSpeed's engine has reference cycles, and would stay on the device beside the next one.
            gc.collect()
        if result is None:
            log.info(f"stopped with {len(results)} of {len(runs)} runs finished; the same command resumes")
            return None
        results.append(result)
    metric = data.task.metrics[0]
    points = summarise(results, metric)
    tree = {"command": hide_secrets(shlex.join(sys.argv)), "settings": common, "points": points, "runs": results}
    tree["best"] = best_run(output, points, results, metric)
    if world.is_main:
        write_json(output / SUMMARY, tree)
    return tree


def summarise(results: Sequence[Mapping[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds (0 for one run) for each learning rate, the best mean of `metric` on dev first."""
    points = []
    for lr in dict.fromkeys(result["settings"]["lr"] for result in results):
        runs = [result for result in results if result["settings"]["lr"] == lr]
        scores: dict[str, dict[str, dict[str, float]]] = {}
        for split, metrics in runs[0]["scores"].items():
            seen = {name: [run["scores"][split][name] for run in runs] for name in metrics}
            scores[split] = {
                name: {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(runs) > 1 else 0.0}
                for name, values in seen.items()
            }
        seconds = round(statistics.fmean(run["seconds"] for run in runs), 3)
        points.append({"point": {"lr": lr}, "runs": len(runs), "scores": scores, "seconds": seconds})
    return sorted(points, key=lambda point: -goodness(metric, point["scores"]["dev"][metric]["mean"]))


def best_run(
    output: Path, points: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], metric: str
) -> dict[str, Any]:
    """The run with the best score on dev at the best learning rate: folder of its model, epoch and score."""
    of_rate = [result for result in results if result["settings"]["lr"] == points[0]["point"]["lr"]]
    best = max(of_rate, key=lambda result: goodness(metric, result["scores"]["dev"][metric]))
    epochs = best["settings"]["epochs"]
    choice = {"epoch": best["best_step"] * epochs // best["steps"], "epochs": epochs, "metric": metric}
    return {"model": str(output / best["name"] / "best"), "dev": best["scores"]["dev"][metric]} | choice


def closing(best: Mapping[str, Any]) -> str:
    """Closing lines: the folder of the best model, and commands for it."""
    model = shlex.quote(best["model"])
    return "\n".join([
        f"best model: {best['model']} (epoch {best['epoch']} of {best['epochs']}, dev {best['metric']} {best['dev']:.4f}). Next:",
        f"  megabert finetune --model {model} --predict FILE --output PREDICTIONS",
        f"  megabert export   --model {model} --output HF_DIR",
    ])  # fmt: skip


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """Learning rates as aligned lines: runs, metrics by split as mean ± standard deviation (for several runs), seconds a run."""
    names = [f"{split} {name}" for split, metrics in points[0]["scores"].items() for name in metrics]
    lines = [["lr", "runs", *names, "seconds"]]
    for point in points:
        several = point["runs"] > 1
        cells = [
            f"{f['mean']:.4f}" + f" ± {f['std']:.4f}" * several
            for metrics in point["scores"].values()
            for f in metrics.values()
        ]
        lines.append([f"{point['point']['lr']:g}", str(point["runs"]), *cells, f"{point['seconds']:.0f}"])
    return aligned(lines)

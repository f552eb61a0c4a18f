"""MegaBERT: BERT pre-training from verified shards to a model anyone can load.

model = megabert.load("runs/mini")
model.fill("The capital of France is [MASK].")     # for each [MASK] its likeliest (word, probability)
model.encode(["one text", "another"])              # fp32 [2, hidden]
model.export("hf/mini")                            # a folder that Hugging Face loads; model.save("runs/next"): one to train from
with megabert.training("runs/new", "mini_modern", data="data/seq128") as trainer:
    for update in trainer:                         # the loop of `megabert train`, in a program of one's own
        print(update.step, float(update.result.host_loss))
dataset = megabert.Dataset("data/seq128")          # verified rows, for torch's DataLoader too
megabert.batches(dataset)                          # masked, in a run's order
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabert.commands.loaded_model import LoadedModel
    from megabert.data.batch import Batch
    from megabert.data.shards import Dataset
    from megabert.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Dataset", "LoadedModel", "batches", "load", "training"]
# imported on first use, since numpy and torch are slow to import
LAZY = {"Dataset": "megabert.data.shards", "LoadedModel": "megabert.commands.loaded_model"}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module 'megabert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *__all__]


def load(source: str | Path, tokenizer: str | Path = "") -> LoadedModel:
    """The model of a run folder (its newest complete checkpoint), of a checkpoint, of a Hugging Face folder, or of the hub by its
    name (google-bert/bert-base-uncased). `tokenizer`: its file, if it is neither in the folder nor in the run's dataset. Raises
    ValueError naming a missing file or a mismatch."""
    from megabert import hf
    from megabert.commands.loaded_model import LoadedModel

    return LoadedModel(hf.load(source, tokenizer))


@contextmanager
def training(
    run: str | Path, config: str = "", *overrides: str, data: str = "", stop_after: int | None = None
) -> Iterator[Trainer]:
    """A run as `megabert train` opens it, new or resumed: `for update in trainer:` trains it update by update, and saves in the end, or
    where Ctrl-C is pressed. In a process of its own, or in one that a launcher started as one of several ranks.

    `config`: a preset or TOML file; `overrides`: texts `section.key=value`. An update has `step`, `objective` and `result`, whose
    `host_loss` is read with float(); `trainer.last_eval` has the metrics of the last evaluation. Raises ValueError naming what is
    missing or does not fit, Failed if files cannot be read or written.
    """
    import time

    from megabert import train
    from megabert.checkpoint import run_lock
    from megabert.distributed.session import Session

    limit = [] if stop_after is None else ["--stop-after", str(stop_after)]
    args = train.parse(["--run", str(run), "--data", data, "--config", config, *limit, *overrides])
    session, good = Session(), False
    try:
        trainer = train.open_trainer(args, session, time.time())
        with closing(trainer):
            yield trainer
            if trainer.finished:
                trainer.sinks.hparams(trainer.last_eval)
        good = True
    finally:
        run_lock.release()
        session.close(good)


def batches(dataset: Dataset, rows: int = 32, seed: int = 42, workers: int = 0, start: int = 0) -> Iterator[Batch]:
    """Endless batches of `rows` masked rows in the order of a run with this seed, from batch `start` on, made by `workers`
    processes. `model(**batch.inputs())` returns loss sums. Raises ValueError for rows that cannot be read and numbers out of range."""
    from numbers import Integral

    from megabert.data.loader import Loader
    from megabert.data.mixture import Mixture
    from megabert.data.shards import Dataset
    from megabert.data.tokenizer import Tokenizer

    if not isinstance(dataset, Dataset | Mixture):
        raise TypeError(f"dataset: expected megabert.Dataset, got {dataset!r:.60}")
    for name, value in {"rows": rows, "seed": seed, "workers": workers, "start": start}.items():
        least = int(name == "rows")
        if not isinstance(value, Integral | int) or not least <= value < 2**63:
            raise ValueError(f"{name}={value!r}: must be a whole number of {least} or more")
    loader = Loader(
        dataset,
        Tokenizer.load(dataset.tokenizer_path),
        global_batch=rows,
        micro_batch=rows,
        seed=seed,
        workers=workers,
        start_step=start,
    )
    with closing(loader):
        for update in loader:
            if update.problem:
                raise ValueError(update.problem)
            yield update.batches[0]

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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megabert.commands.extraction import Extractor
    from megabert.data.batch import Batch
    from megabert.data.shards import Dataset
    from megabert.data.tokenizer import Tokenizer
    from megabert.hf import Pretrained
    from megabert.model import BertForPreTraining
    from megabert.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Dataset", "LoadedModel", "batches", "load", "training"]
POOLS = ("mean", "max", "cls")  # vectors of a text from those of its tokens


def __getattr__(name: str) -> Any:
    """`megabert.Dataset`, imported on first use, since numpy is slow to import."""
    if name == "Dataset":
        from megabert.data.shards import Dataset

        return Dataset
    raise AttributeError(f"module 'megabert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *__all__]


class LoadedModel:
    """A trained model with its tokenizer, in memory; made by `load`."""

    def __init__(self, pretrained: Pretrained) -> None:
        self.pretrained = pretrained
        self._extractor: Extractor | None = None

    def __repr__(self) -> str:
        size = self.pretrained.config.model
        shape = f"{size.kind}, {size.layers} layers of {size.hidden}, {size.vocab_size:,} tokens"
        return f"LoadedModel({str(self.pretrained.run_dir)!r}, step {self.pretrained.step:,}: {shape})"

    @property
    def tokenizer(self) -> Tokenizer:
        """Maps texts to ids, int32 [n, T] from [CLS] to [SEP], padded with 0."""
        return self.pretrained.tokenizer

    @cached_property
    def model(self) -> BertForPreTraining:
        """The module, in fp32 on the CPU, in eval mode. Called with only ids it returns logits as `logits` does."""
        import torch

        return self.pretrained.model(torch.device("cpu"))

    def encode(self, texts: str | Sequence[str], pool: str = "mean") -> np.ndarray:
        """Vectors of texts from the last layer, fp32 [n, hidden], in their order; `pool`: mean, max or cls. On a GPU where
        there is one. A text longer than the model's positions is cut. Raises ValueError for another pool and for half a
        character in a text, TypeError for what is no text."""
        from megabert.commands.extraction import Extractor
        from megabert.data.tokenizer import list_texts

        if pool not in POOLS:
            raise ValueError(f"pool={pool!r}: choose {', '.join(POOLS)}")
        given = list_texts(texts)
        current = self._read_weights()
        if self._extractor is None:
            self._extractor = Extractor(current)
        self._extractor.pool = pool
        return self._extractor.encode(given)

    def logits(self, texts: str | Sequence[str] | Tensor) -> Tensor:
        """Logits of texts, or of ids as `tokenizer` returns them: fp32 [n, T, V]; of the next token for a causal model. Without gradients
        and dropout; use `model` for those. Raises ValueError for a text too long for the model, for ids that are not the vocabulary's,
        and for a model without an MLM head."""
        import torch

        from megabert.model import evaluating

        self._refuse_without_mlm_head()
        config, ids = self.pretrained.config, texts if isinstance(texts, torch.Tensor) else self.tokenizer(texts)
        if ids.ndim != 2 or not ids.shape[1] or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"ids of shape {list(ids.shape)}, {ids.dtype}: expected whole numbers [n, T], as of tokenizer"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.model.vocab_size:
            raise ValueError(
                f"ids {int(ids.min())} to {int(ids.max())}: the model has 0 to {config.model.vocab_size - 1}"
            )
        if ids.shape[1] > config.model.max_positions:
            raise ValueError(
                f"{ids.shape[1]} tokens, the model takes at most {config.model.max_positions}; shorten the text"
            )
        with evaluating(self.model):
            logits: Tensor = self.model(ids, causal=config.data.masking.causal)
            return logits

    def fill(self, text: str | Sequence[str], top: int = 5) -> list[Any]:
        """The `top` likeliest (word, probability) of each [MASK] in `text`; of several texts a list of these. Raises ValueError for a
        text without one or too long for the model, for `top` below 1, and for a model without an MLM head."""
        from megabert.commands.fill import Filler
        from megabert.data.tokenizer import list_texts

        self._refuse_without_mlm_head()
        filler = Filler(self.pretrained, self.model)
        filled = [filler.fill(one, top) for one in list_texts(text)]
        return filled[0] if isinstance(text, str) else filled

    def _refuse_without_mlm_head(self) -> None:
        """As of `pretrained`, whose new head is trained if its weights have changed in memory."""
        try:
            self.pretrained.refuse_without_mlm_head()
        except ValueError:
            self._read_weights().refuse_without_mlm_head()

    def _read_weights(self) -> Pretrained:
        """Give `pretrained` the weights that `model` has now; returns it. Raises ValueError for NaN or infinite ones."""
        from megabert.checkpoint import refuse_non_finite

        known = self.pretrained.weights
        if "model" in self.__dict__:
            now = {name: weight.cpu().float() for name, weight in self.model.state_dict().items()}
            if not all(now[name].equal(weight) for name, weight in known.items()):
                refuse_non_finite(now, f"{self.pretrained.run_dir}, changed in memory")
                self.pretrained = self.pretrained.with_weights({name: now[name].clone() for name in known})
                self._extractor = None
        return self.pretrained

    def export(self, output: str | Path, overwrite: bool = False) -> None:
        """Write the model, as it is now, as a folder that Hugging Face loads. Raises ValueError for a folder that is not empty, unless
        `overwrite` replaces an exported one."""
        from megabert.commands.export import write

        write(self._read_weights(), output, overwrite)

    def save(self, run: str | Path) -> None:
        """Write the model, as it is now, as a new run folder, for commands that read a model, and to train from (`init_from`). Raises
        ValueError for a folder that is not empty."""
        from megabert import hf

        hf.write_run(self._read_weights(), run, dataset="none, saved from Python: begin a new run with init_from")


def load(source: str | Path, tokenizer: str | Path = "") -> LoadedModel:
    """The model of a run folder (its newest complete checkpoint), of a checkpoint, of a Hugging Face folder, or of the hub by its
    name (google-bert/bert-base-uncased). `tokenizer`: its file, if it is neither in the folder nor in the run's dataset. Raises
    ValueError naming a missing file or a mismatch."""
    from megabert import hf

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

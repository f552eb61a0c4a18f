"""Contrastive fine-tuning: a run whose best weights are a sentence-transformers folder.

RUN/best/          the folder (`megabert.hf.sentence_folder`)
RUN/metrics.jsonl  and tensorboard/, as in pre-training
RUN/result.json    written last: the run is finished
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import hf as pretrained
from megabert.common.errors import BadTraining
from megabert.config import Config
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.process_group import World
from megabert.engine import DTYPES
from megabert.finetune.batches import Update
from megabert.finetune.embed import batches, metrics, model
from megabert.finetune.embed.model import Embedder
from megabert.finetune.embed.pairs import Pairs, Scored, relevant
from megabert.finetune.run import Run, RunSettings, configure
from megabert.hf import Pretrained, model_card, sentence_folder
from megabert.hf.sentence_folder import Pooling


@dataclass(frozen=True)
class Settings(RunSettings):
    """What is chosen for a run on pairs; `batch` is in pairs, `micro_batch` in texts."""

    batch: int = 64
    epochs: int = 1
    pool: str = "mean"
    temperature: float = 0.05  # SimCSE's; sentence-transformers' scale of 20


@dataclass(frozen=True)
class Data:
    """What is learned from, and what is judged by: "dev" and perhaps "test"."""

    train: Pairs
    judged: dict[str, Pairs | Scored]


def configured(start: Config, settings: Settings, pairs: int, world_size: int, log_interval: int) -> Config:
    """The engine's config. Raises ValueError naming the option that does not fit."""
    # A rank's whole share is one micro-batch for the engine: the loss is of all of it, whatever its chunks.
    return configure(start, replace(settings, micro_batch=0), pairs, world_size, log_interval)


class EmbeddingRun(Run):
    """A run on pairs."""

    def __init__(
        self,
        folder: Path,
        name: str,
        data: Data,
        start: Pretrained,
        settings: Settings,
        world: World,
        log_interval: int = 20,
    ) -> None:
        """`start`: model, weights (unless from scratch) and tokenizer. `log_interval`: updates between two lines."""
        self.data, self.start, self.chosen = data, start, settings
        self.texts = batches.encode(data.train.texts, start.tokenizer, settings.max_length)
        config = configured(start.config, settings, len(data.train), world.size, log_interval)
        torch.manual_seed(settings.seed)
        module = model.build(
            config,
            None if settings.from_scratch else start.weights,
            settings.pool,
            world,
            DTYPES[config.precision],
            temperature=settings.temperature,
        )
        super().__init__(
            folder=folder,
            name=name,
            config=config,
            settings=settings,
            module=module,
            world=world,
            items=len(data.train),
            metric=figure_of(data.judged["dev"]),
        )

    @property
    def pooling(self) -> Pooling:
        return Pooling(self.chosen.pool, self.chosen.max_length)

    def judged(self, progress: Callable[[], None]) -> dict[str, float]:
        return self.judge(self.module, "dev", progress)

    def scores(self, best: Path, progress: Callable[[], None]) -> dict[str, dict[str, float]]:
        module = load(best, self.world, DTYPES[self.config.precision])[0]
        return {split: self.judge(module, split, progress) for split in sorted(self.data.judged)}

    def judge(self, module: Embedder, split: str, progress: Callable[[], None]) -> dict[str, float]:
        """A split's figures, on every rank. A collective."""
        found = judge(
            module, self.data.judged[split], self.start.tokenizer, self.pooling.max_length, self.world, progress
        )
        if found is None:
            raise BadTraining(f"{self.folder}: the model's output is not finite; lower --lr")
        return found

    def keep(self, folder: Path, weights: Mapping[str, Tensor], results: Mapping[str, Any]) -> None:
        encoder = {name.removeprefix("encoder."): weight for name, weight in weights.items()}
        text = card(self.start, f"{folder.resolve().parent.name}", self.pooling, results)
        sentence_folder.write(folder, self.start, encoder, self.pooling, text)

    def updates(self, first: int, share_used: Callable[[int], float]) -> Generator[Update, None, None]:
        return batches.updates(
            self.data.train,
            self.texts,
            self.module.layout(self.chosen.max_length),
            self.chosen.seed,
            self.chosen.batch,
            first,
            self.chosen.micro_batch,
            self.world.rank,
            self.world.size,
        )


def figure_of(judged: Pairs | Scored) -> str:
    """The figure that says which weights are best."""
    return next(iter(metrics.RETRIEVAL)) if isinstance(judged, Pairs) else metrics.SIMILARITY[0]


def judge(
    module: Embedder,
    given: Pairs | Scored,
    tokenizer: Tokenizer,
    max_length: int,
    world: World,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, float] | None:
    """Figures on pairs (each first text searches all second ones) or on scored pairs; None where a vector is not finite.
    The same on every rank. A collective."""
    items = batches.encode(given.texts, tokenizer, max_length)
    found = F.normalize(model.vectors_of(module, items, max_length, world, progress=progress), dim=-1)
    if not bool(torch.isfinite(found).all()):
        return None
    if isinstance(given, Scored):
        first, second = (found[torch.from_numpy(side).to(found.device)] for side in (given.first, given.second))
        return metrics.similarity((first * second).sum(-1).double().cpu().numpy(), given.scores)
    queries, corpus, wanted = relevant(given)
    asked, searched = (found[torch.from_numpy(side).to(found.device)] for side in (queries, corpus))
    return metrics.retrieval(*metrics.nearest(asked, searched), wanted)


def load(
    source: str | Path, world: World, dtype: torch.dtype, pool: str = "", max_length: int = 0, tokenizer: str = ""
) -> tuple[Embedder, Pretrained, Pooling]:
    """A model that gives vectors, in `dtype` and eval mode: a sentence-transformers folder (or the run it lies in), or any
    pre-trained one with mean pooling; `pool` and `max_length` where they are to be others than its own.

    Raises ValueError naming what is missing, or cannot be read.
    """
    best = Path(source) / "best"
    path = best if sentence_folder.is_sentence_folder(best) else Path(source)
    found = pretrained.load(path, tokenizer)
    most = found.config.model.max_positions
    own = sentence_folder.read(path) if sentence_folder.is_sentence_folder(path) else Pooling("mean", most)
    pooling = replace(own, pool=pool or own.pool, max_length=max_length or own.max_length)
    if not 4 <= pooling.max_length <= most:
        raise ValueError(f"--max-length {pooling.max_length}: the model takes 4 to {most} tokens")
    module = model.build(found.config, found.weights, pooling.pool, world, dtype, normalise=pooling.normalise)
    return module.to(world.device, dtype).eval(), found, pooling


EXAMPLE = """```python
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("{name}")
vectors = model.encode(["a text", "another one"])
print(model.similarity(vectors, vectors))
```"""


def card(start: Pretrained, name: str, pooling: Pooling, results: Mapping[str, Any]) -> str:
    """The README.md of an embedding model; `results` are what training said of it."""
    chosen = results["settings"]
    rows = {
        "vector": f"{start.config.model.hidden} numbers of length 1",
        "pooling": "mean over all tokens" if pooling.pool == "mean" else "the token that stands for the text",
        "tokens of a text at most": pooling.max_length,
        "loss": "a pair's second text among those of its batch (multiple negatives ranking), temperature "
        f"{chosen['temperature']:g}",
        "pairs an update, epochs": f"{chosen['batch']}, {chosen['epochs']}",
        "learning rate, seed": f"{chosen['lr']:g}, {chosen['seed']}",
        **{f"dev {name} (update {results['step']:,})": f"{v:.4f}" for name, v in results["dev"].items()},
    }
    recipe = model_card.recipe(start) if not chosen["from_scratch"] else {"updates": "none"}
    return (
        "\n\n".join(
            [
                "---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-similarity\ntags:\n"
                "- sentence-transformers\n- bert\n- megabert\n---",
                f"# {name}",
                "Vectors of texts: those of texts that belong together have a large cosine.",
                EXAMPLE.format(name=name),
                "## Model",
                model_card.table(rows),
                "## Pre-training",
                model_card.table(recipe),
            ]
        )
        + "\n"
    )

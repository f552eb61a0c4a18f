"""Text, held-out documents and shards of the race, the same bytes for all entries with the same vocabulary; scores of weights.

One document in a hundred, by the hash of its bytes, is held out before the build, so that no vocabulary or training uses it. The
rest is built into shards by data_prep, which holds out another hundredth for choosing recipes. All entries are scored by the
project's evaluation, with 15% of the tokens masked one by one. Bits a byte are the mean loss of a masked token over the mean bytes
of a maskable token, which makes vocabularies comparable: a larger one has fewer and longer tokens.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import hardware
from data_prep.readers import pydoc_corpus
from megabert import config as configuration
from megabert import evaluation
from megabert.common.files import atomic_folder
from megabert.config import EvalConfig, MaskingConfig, OpsConfig, replace
from megabert.data.shards import Dataset, Manifest
from megabert.data.tokenizer import Tokenizer
from megabert.model import BertForPreTraining

SEQ_LEN = 128
ONE_IN = 100  # one in this many documents is held out, and as many again for choosing recipes
MARK = "split.json"
HELD_OUT_ROWS, CURVE_ROWS = 2_048, 512  # rows of a final score (about 37,000 masked tokens), and of a point of a curve
WIKI_DOCUMENT = re.compile(rb"<doc .*?</doc>\n?", re.S)


@dataclass(frozen=True)
class RaceData:
    """Dataset folders for training and of the held-out documents, and the SHA-256 of those documents."""

    train: Path
    held_out: Path
    documents: str

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest.load(self.train)

    @property
    def tokens_a_row(self) -> float:
        """Real tokens of a training row, the mean over the dataset."""
        return self.manifest.statistics["tokens"] / self.manifest.rows

    def identity(self) -> dict[str, str]:
        """Data of a result: the held-out documents, and the fingerprints of both datasets."""
        prints = {name: Manifest.load(getattr(self, name)).fingerprint for name in ("train", "held_out")}
        return {"documents": self.documents} | prints


def default_text() -> Path:
    """The folder with `enwiki` and `novels`: MEGABERT_DATA, or `../shared/data` beside the checkout."""
    return Path(os.environ.get("MEGABERT_DATA") or hardware.ROOT.parent / "shared/data")


def files_of(text: Path) -> list[tuple[str, Path]]:
    """(name, file) of the race's text, in order; [] if neither folder exists."""
    paths = sorted(text.glob("enwiki/*/wiki_*")) + sorted(text.glob("novels/*.txt"))
    return [("_".join(path.relative_to(text).with_suffix("").parts), path) for path in paths]


def documents_of(path: Path) -> Iterator[bytes]:
    """A WikiExtractor file's `<doc …>` elements; any other file is one document."""
    raw = bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()
    if raw.lstrip().startswith(b"<doc "):
        yield from WIKI_DOCUMENT.findall(raw)
    else:
        yield raw


def is_held_out(document: bytes) -> bool:
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") % ONE_IN == 0


def split(text: Path, target: Path) -> None:
    """Write the documents of `text` to `target/train` and `target/held_out`, unless they exist. Raises ValueError if none is held out."""
    if (target / MARK).is_file():
        return
    named = [(f"{name}.txt", documents_of(path)) for name, path in files_of(text)]
    if not named:  # the documentation in every Python installation, a document a line of JSON
        texts = (one for path, _ in pydoc_corpus.files() for one in pydoc_corpus.documents(path))
        named = [("built-in.jsonl", (json.dumps({"text": one}).encode() + b"\n" for one in texts))]
    counts, digest = {"train": 0, "held_out": 0}, hashlib.sha256()
    with atomic_folder(target, MARK, overwrite=True) as folder:
        for name, documents in named:
            parts: dict[str, list[bytes]] = {part: [] for part in counts}
            for document in documents:
                parts["held_out" if is_held_out(document) else "train"].append(document)
            for document in parts["held_out"]:
                digest.update(hashlib.sha256(document).digest())
            for part, chosen in parts.items():
                counts[part] += len(chosen)
                if chosen:
                    (folder / part).mkdir(exist_ok=True)
                    (folder / part / name).write_bytes(b"".join(chosen))
        if not counts["held_out"] or not counts["train"]:
            raise ValueError(f"{text}: {counts['train']} documents, none of {ONE_IN} held out; give more text")
        (folder / MARK).write_text(json.dumps({"counts": counts, "documents": digest.hexdigest()}) + "\n")


def folder_of(work: Path, text: Path) -> Path:
    """The folder in `work` of what is made from a text, or from the documentation where `text` has no files."""
    if not files_of(text):
        return work / "built-in"
    return work / f"{text.resolve().name}-{hashlib.sha256(str(text.resolve()).encode()).hexdigest()[:8]}"


def prepare(work: Path, text: Path, vocabulary: int | str = 30_000) -> RaceData:
    """The shards of `text` with a vocabulary of this size, or of a tokenizer file; built if missing. Raises ValueError if that fails."""
    own = folder_of(work, text)
    texts = own / "text"
    split(text, texts)
    documents = json.loads((texts / MARK).read_text())["documents"]
    return build_both(texts / "train", texts / "held_out", own / "vocab", documents, vocabulary, 1 / ONE_IN)


def build_both(train: Path, held_out: Path, stem: Path, digest: str, vocabulary: int | str, share: float) -> RaceData:
    """The shards of a text, of which `share` is held out, with a vocabulary as of `prepare`, and of its held-out documents, with the same
    tokenizer; built in STEM-VOCABULARY if missing."""
    folder = stem.with_name(f"{stem.name}-{vocabulary if isinstance(vocabulary, int) else Path(vocabulary).stem}")
    data = RaceData(folder / "train", folder / "held_out", digest)
    option = "--vocab-size" if isinstance(vocabulary, int) else "--tokenizer"
    tail = "--seq-len", SEQ_LEN, "--held-out"
    hardware.build_data(data.train, "--input", train, option, vocabulary, *tail, share)
    tokenizer = data.train / data.manifest.tokenizer["file"]
    hardware.build_data(data.held_out, "--input", held_out, "--tokenizer", tokenizer, *tail, 0)
    return data


class Scorer:
    """Figures of weights on the first `rows` rows of a dataset of held-out documents."""

    def __init__(self, folder: Path, rows: int, threads: int) -> None:
        self.dataset, self.rows, self.threads = Dataset(folder), rows, threads
        self.tokenizer = Tokenizer.load(self.dataset.tokenizer_path)
        self.bytes_per_token = evaluation.bytes_per_token(self.dataset, self.tokenizer, causal=False)

    def score(self, weights: Mapping[str, Tensor], tree: dict[str, Any]) -> dict[str, float]:
        """`bits` a byte, `loss` in nats a masked token and `accuracy`, of a model with the configuration `tree`."""
        torch.set_num_threads(self.threads)
        cfg = configuration.from_dict(tree)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = BertForPreTraining(cfg.model, OpsConfig(), device.type, torch.float32)
        model.load_state_dict(dict(weights))
        cfg = replace(replace(cfg, "data.masking", MaskingConfig()), "batch.micro_size", 32)
        cfg = replace(cfg, "eval", EvalConfig(rows=self.rows))
        batches = evaluation.fixed_batches(self.dataset, self.tokenizer, cfg)
        held_out = evaluation.summary(evaluation.batch_sums(model.to(device), batches, device))
        return figures(held_out["eval/mlm_loss"], held_out["eval/mlm_accuracy"], self.bytes_per_token)


def figures(loss: float, accuracy: float, bytes_per_token: float) -> dict[str, float]:
    """The three figures of a score, from a loss in nats a token."""
    bits = loss / math.log(2) / bytes_per_token
    return {"bits": round(bits, 5), "loss": round(loss, 5), "accuracy": round(accuracy, 5)}

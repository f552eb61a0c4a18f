"""Filters by the user's fastText models: the language of a document, or its quality.

A document is kept if the sum of the probabilities of the wanted labels reaches a minimum. The fastText package (Joulin et al. 2017,
"Bag of Tricks for Efficient Text Classification") is needed only here, for prediction.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput
from megabert.common.environment import require_packages

# prefix of labels in a model's file
PREFIX = "__label__"
# characters of a document to classify
READ = 10_000
# first bytes of a model, and the size of these, the version and the training arguments
MAGIC, ARGUMENTS = struct.pack("<i", 793712314), 64
# where the kind of a model is, and that of a classifier
KIND, SUPERVISED = 36, 3


@dataclass(frozen=True)
class Classifier:
    """A model file, the labels to keep (without their prefix) and the minimum of the sum of their probabilities."""

    path: str
    labels: tuple[str, ...]
    minimum: float

    @staticmethod
    def parse(text: str) -> Classifier:
        """The classifier of `FILE:LABELS:P`. Raises BadInput for another form."""
        path, labels, minimum = ["", "", *text.rsplit(":", 2)][-3:]
        try:
            share = float(minimum)
        except ValueError:
            share = -1.0
        if not path or not all(labels.split(",")) or not 0 <= share <= 1:
            raise BadInput(f"--classifier {text}: give FILE:LABELS:P, with labels a,b and P in 0..1")
        return Classifier(path, tuple(labels.split(",")), share)

    def keeps(self, text: str) -> bool:
        """Whether to keep a document, which is classified as one line."""
        labels, shares = _load(self.path)[0].predict(" ".join(text[:READ].split()), k=-1)
        wanted = (p for label, p in zip(labels, shares, strict=True) if label.removeprefix(PREFIX) in self.labels)
        return sum(wanted) >= self.minimum

    def objection(self, text: str, metadata: Mapping[str, Any]) -> str:
        """The reason under which a dropped document is counted; "" if it is kept."""
        return "" if self.keeps(text) else f"classifier {Path(self.path).name}"

    def check(self) -> None:
        """Raises BadInput if the model, a label or the package is missing."""
        known = _load(self.path)[1]
        for label in self.labels:
            if label not in known:
                raise BadInput(f"{self.path}: has no label {label!r}; it has {', '.join(known[:20])}")


@lru_cache(maxsize=4)
def _load(path: str) -> tuple[Any, list[str]]:
    """A model, and its labels in order."""
    require_packages(path, "fasttext", "fasttext")
    import fasttext

    if not Path(path).is_file():
        raise BadInput(f"{path}: no such model file")
    labels = _read_labels(path)
    try:
        return fasttext.load_model(path), labels
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"{path}: not a fastText model ({error})") from None


def _read_labels(path: str) -> list[str]:
    """The labels of a model, [] for a file of another format. Raises BadInput for word vectors, and for a file that is shorter than its
    header says: the library reads it without end, or takes what is missing for zeros.

    Layout: `FastText`, `Dictionary`, `DenseMatrix` and `QuantMatrix::load` of fastText 0.9.
    """
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as model:
            with contextlib.suppress(struct.error):
                if struct.unpack_from("<i", model, KIND)[0] != SUPERVISED:
                    raise BadInput(f"{path}: has word vectors; name a model that was trained to classify")
                labels, end = _find_labels_and_end(model)
                if end <= len(model):
                    return labels
            raise BadInput(f"{path}: ends early; the file was copied or downloaded in part")


def _find_labels_and_end(model: mmap.mmap) -> tuple[list[str], int]:
    """Labels and bytes of the model that begins so. Raises struct.error if the sizes of its parts are missing."""
    at, labels = ARGUMENTS, list[str]()

    def take(fields: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(fields, model, at)
        at += struct.calcsize(fields)
        return values

    entries, _, _, _, pruned = take("<3i2q")
    for _ in range(entries):
        end = model.find(b"\0", at)
        if end < 0:
            raise struct.error
        name, at = model[at:end], end + 1
        if take("<qb")[1]:  # a count, and whether it is a label
            labels.append(name.decode(errors="replace").removeprefix(PREFIX))
    at += 8 * max(pruned, 0)
    quantized = True
    for _ in ("input", "output"):
        quantized = take("<?")[0] and quantized
        if not quantized:
            rows, columns = take("<2q")
            at += 4 * rows * columns
            continue
        with_norms, rows, _, codes = take("<?2qi")
        for size in (codes, rows) if with_norms else (codes,):
            at += size
            dimensions, _, _, _ = take("<4i")
            at += 4 * 256 * dimensions  # centroids of the 256 codes
    return sorted(labels), at


def forget() -> None:
    """Load files again, which may have changed since an earlier build of this process."""
    _load.cache_clear()

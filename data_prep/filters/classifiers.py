"""Filters by the user's fastText models: the language of a document, or its quality.

A document is kept if the sum of the probabilities of the wanted labels reaches a minimum. The fastText package (Joulin et al. 2017,
"Bag of Tricks for Efficient Text Classification") is needed only here, for prediction.
"""

from __future__ import annotations

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
        labels, shares = _load(self.path).predict(" ".join(text[:READ].split()), k=-1)
        wanted = {PREFIX + label for label in self.labels}
        return sum(p for label, p in zip(labels, shares, strict=True) if label in wanted) >= self.minimum

    def objection(self, text: str, metadata: Mapping[str, Any]) -> str:
        """The reason under which a dropped document is counted; "" if it is kept."""
        return "" if self.keeps(text) else f"classifier {Path(self.path).name}"

    def check(self) -> None:
        """Raises BadInput if the model, a label or the package is missing."""
        known = sorted(label.removeprefix(PREFIX) for label in _load(self.path).predict("a", k=-1)[0])
        for label in self.labels:
            if known and label not in known:  # some models give no label for an unknown word
                raise BadInput(f"{self.path}: has no label {label!r}; it has {', '.join(known[:20])}")


@lru_cache(maxsize=4)
def _load(path: str) -> Any:
    require_packages(path, "fasttext", "fasttext")
    import fasttext

    if not Path(path).is_file():
        raise BadInput(f"{path}: no such model file")
    if not _is_whole(path):
        raise BadInput(f"{path}: ends early; the file was copied or downloaded in part")
    try:
        return fasttext.load_model(path)
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"{path}: not a fastText model ({error})") from None


def _is_whole(path: str) -> bool:
    """Whether a file is as long as its header says; true for files of other formats. The library reads a shorter one without end, or
    takes what is missing for zeros.

    Layout: `FastText`, `Dictionary`, `DenseMatrix` and `QuantMatrix::load` of fastText 0.9.
    """
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return True
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as model:
            try:
                return _find_end(model) <= len(model)
            except struct.error:
                return False


def _find_end(model: mmap.mmap) -> int:
    """Bytes of the model that begins so. Raises struct.error if the sizes of its parts are missing."""
    at = ARGUMENTS

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
        at = end + 10  # a name that ends with NUL, a count (8 bytes) and a kind (1)
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
    return at


def forget() -> None:
    """Load files again, which may have changed since an earlier build of this process."""
    _load.cache_clear()

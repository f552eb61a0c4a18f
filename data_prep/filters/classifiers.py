"""Filters by fastText models that the user names: the language of a document, or its quality.

A document is kept whose probabilities of the wanted labels together reach a minimum. fastText (Joulin et al. 2017, "Bag of
Tricks for Efficient Text Classification") is a package that is needed only here, and only to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput

# before a label in a model's file
PREFIX = "__label__"
# characters of a document that are judged
READ = 10_000


@dataclass(frozen=True)
class Classifier:
    """A model file, the labels to keep (without their prefix) and the minimum of their probabilities together."""

    path: str
    labels: tuple[str, ...]
    minimum: float

    @staticmethod
    def parse(text: str) -> Classifier:
        """The classifier of `FILE:LABELS:P`. Raises BadInput where it is not of that form."""
        path, labels, minimum = ["", "", *text.rsplit(":", 2)][-3:]
        try:
            share = float(minimum)
        except ValueError:
            share = -1.0
        if not path or not all(labels.split(",")) or not 0 <= share <= 1:
            raise BadInput(f"--classifier {text}: give FILE:LABELS:P, with labels a,b and P in 0..1")
        return Classifier(path, tuple(labels.split(",")), share)

    def keeps(self, text: str) -> bool:
        """Whether a document is kept. It is judged as one line."""
        labels, shares = _load(self.path).predict(" ".join(text[:READ].split()), k=-1)
        wanted = {PREFIX + label for label in self.labels}
        return sum(p for label, p in zip(labels, shares, strict=True) if label in wanted) >= self.minimum

    def check(self) -> None:
        """Raises BadInput where there is no such model or label, or no package to read it with."""
        known = sorted(label.removeprefix(PREFIX) for label in _load(self.path).predict("a", k=-1)[0])
        for label in self.labels:
            if known and label not in known:  # some models give no label for an unknown word
                raise BadInput(f"{self.path}: has no label {label!r}; it has {', '.join(known[:20])}")


@lru_cache(maxsize=4)
def _load(path: str) -> Any:
    try:
        import fasttext
    except ImportError:
        raise BadInput(
            f"{path}: reading it takes the package fasttext-predict; pip install 'megabert[fasttext]'"
        ) from None
    if not Path(path).is_file():
        raise BadInput(f"{path}: no such model file")
    try:
        return fasttext.load_model(path)
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"{path}: not a fastText model ({error})") from None

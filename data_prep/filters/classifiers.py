"""Verdicts of fastText models that the user names: the language of a document, or a quality that a model was trained to tell.

A document stays whose probabilities of the wanted labels together reach a least one. fastText (Joulin et al. 2017, "Bag of
Tricks for Efficient Text Classification") is a package that is needed only here, and only to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput

PREFIX = "__label__"  # before a label in a model's file
READ = 10_000  # characters of a document that are judged


@dataclass(frozen=True)
class Classifier:
    """A model file, the labels to keep (without their prefix) and the least probability of these together."""

    path: str
    labels: tuple[str, ...]
    least: float

    def keeps(self, text: str) -> bool:
        """Whether a document stays. Its line ends are blanks: a model judges one line."""
        model = _load(self.path)
        line = " ".join(text[:READ].split())
        found, shares = model.predict(line, k=-1)
        wanted = {PREFIX + label for label in self.labels}
        return sum(p for label, p in zip(found, shares, strict=True) if label in wanted) >= self.least

    def check(self) -> None:
        """Raises BadInput where there is no such model or label, or no package to read it with."""
        model = _load(self.path)
        known = sorted(label.removeprefix(PREFIX) for label in model.predict("a", k=-1)[0])
        for label in self.labels:
            if known and label not in known:  # of an unknown word some models tell none
                shown = ", ".join(known[:20]) + ", …" * (len(known) > 20)
                raise BadInput(f"{self.path}: has no label {label!r}; it has {shown}")
        if not self.labels:
            raise BadInput(f"{self.path}: name the labels of the documents to keep")
        if not 0 <= self.least <= 1:
            raise BadInput(f"{self.path}: a least probability lies in 0..1, not {self.least:g}")


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

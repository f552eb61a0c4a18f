"""Texts that belong together, read from tables, lines and SQuAD's JSON; each distinct text is kept once and has a number.

two columns     a text and one that belongs to it, with any further columns of texts that look as if they did (hard
                negatives); `label` and `positive` choose the rows of a labelled table, as of RTE's entailments
one column      texts alone; also a file of lines
SQuAD's JSON    a question and its paragraph; questions without an answer are left out
a score column  pairs with a number, as STS-B's
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common import arrow_tables, tables
from megabert.finetune import datasets, tasks
from megabert.finetune.examples import Question

SQUAD = ".json"


@dataclass(frozen=True)
class Columns:
    """Where a file's texts stand: names of a header, or numbers from 0 of a table without one. SQuAD's JSON has none."""

    text: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    label: str = ""
    positive: str = ""
    score: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError naming what does not go together."""
        if len(self.text) > 2:
            raise ValueError(f"--text {self.text[2]}: a pair has two texts, this is a third")
        if bool(self.label) != bool(self.positive):
            raise ValueError("--label COLUMN and --positive LABEL go together: rows of another label are left out")
        if self.label and not self.text:
            raise ValueError(f"--label {self.label}: is of a table; name the columns of its texts with --text")
        if self.negative and len(self.text) < 2:
            raise ValueError(f"--negative {self.negative[0]}: is for pairs; name both texts with --text")
        if self.score and (len(self.text) < 2 or self.label or self.negative):
            raise ValueError(f"--score {self.score}: is for pairs of texts without labels and negatives")
        given = (*self.text, *self.negative, *filter(None, (self.label, self.score)))
        if len({column.isdecimal() for column in given}) > 1:
            raise ValueError(f"columns {', '.join(given)}: give all by name or all by number")

    @property
    def headed(self) -> bool:
        return not (self.text and self.text[0].isdecimal())


@dataclass(frozen=True, eq=False)
class Pairs:
    """`first[i]` and `second[i]` belong together, or are one text where there are no pairs; all are numbers of `texts`."""

    texts: list[str]
    first: np.ndarray  # int64 [n]
    second: np.ndarray  # int64 [n]
    negatives: list[np.ndarray]  # n times int64 [k], k any number

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, eq=False)
class Scored:
    """Pairs of texts and how alike they are, in whatever numbers."""

    texts: list[str]
    first: np.ndarray  # int64 [n]
    second: np.ndarray  # int64 [n]
    scores: np.ndarray  # float64 [n]

    def __len__(self) -> int:
        return len(self.first)


class Numbered:
    """Numbers of distinct texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._of: dict[str, int] = {}

    def number(self, text: str) -> int:
        found = self._of.setdefault(text, len(self.texts))
        if found == len(self.texts):
            self.texts.append(text)
        return found


def read(path: str | Path, columns: Columns, limit: int = 0) -> Pairs | Scored:
    """The pairs of a file, or with `columns.score` its scored ones; the first `limit` of them, 0: all.

    Raises ValueError naming file and line of an empty text, a missing column, a score that is no finite number, and a
    file with nothing to learn from.
    """
    path, numbered = Path(path), Numbered()
    first, second, negatives, scores = [], [], [], []
    for a, b, others, score in _rows(path, columns):
        first.append(numbered.number(a))
        second.append(numbered.number(b))
        negatives.append(np.array([numbered.number(text) for text in others], np.int64))
        scores.append(score)
        if len(first) == limit:
            break
    if not first:
        why = f" whose {columns.label} is {columns.positive}" if columns.label else ""
        raise ValueError(f"{path}: holds no pair{why}")
    one, other = np.array(first, np.int64), np.array(second, np.int64)
    if columns.score:
        return Scored(numbered.texts, one, other, np.array(scores, np.float64))
    return Pairs(numbered.texts, one, other, negatives)


Row = tuple[str, str, list[str], float]


def _rows(path: Path, columns: Columns) -> Iterator[Row]:
    if columns.text:
        yield from _table(path, columns)
    elif tables.ending(path) == SQUAD:
        for question in datasets.read(tasks.preset("squad2.0"), path):
            assert isinstance(question, Question)
            if not question.impossible:
                yield question.question.strip(), question.context.strip(), [], 0.0
    elif tables.ending(path) in tables.ENDINGS or arrow_tables.is_table(path):
        raise ValueError(f"{path}: is a table; name the columns of its texts with --text")
    else:
        for number, line in tables.lines(path):
            text = tables.text_of(line, f"{path}, line {number}")
            yield text, text, [], 0.0


def _table(path: Path, columns: Columns) -> Iterator[Row]:
    more = [column for column in (columns.label, columns.score) if column]
    wanted = [*columns.text, *columns.negative, *more]
    size = len(columns.text)
    for where, values in tables.rows(path, wanted, columns.headed):
        if columns.label and _label(values[-1]) != columns.positive:
            continue
        texts = [tables.text_of(values[i], f"{where}, column {name!r}") for i, name in enumerate(columns.text)]
        others = []
        for name, value in zip(columns.negative, values[size:], strict=False):
            listed = value if isinstance(value, list) else [value]
            others += [tables.text_of(text, f"{where}, column {name!r}") for text in listed]
        score = _score(values[-1], f"{where}, column {columns.score!r}") if columns.score else 0.0
        yield texts[0], texts[-1], others, score


def _label(value: Any) -> str:
    """A label as a text, true and false as JSON has them."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _score(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: score {str(value)!r:.40} is no finite number")
    return number


def relevant(pairs: Pairs) -> tuple[np.ndarray, np.ndarray, list[set[int]]]:
    """What a search is judged by: int64 [q] distinct first texts; int64 [c] the texts that are searched, second ones and
    negatives; and for each query which places of the latter belong to it."""
    queries = np.unique(pairs.first)
    corpus = np.unique(np.concatenate([pairs.second, *pairs.negatives]))
    wanted: list[set[int]] = [set() for _ in queries]
    places = np.searchsorted(queries, pairs.first), np.searchsorted(corpus, pairs.second)
    for query, place in zip(*places, strict=True):
        wanted[query].add(int(place))
    return queries, corpus, wanted

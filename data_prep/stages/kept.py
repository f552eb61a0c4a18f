"""Documents that reading kept: their records, their numbers, and how later stages load them.

The number of a document or paragraph is its task's number << TASK_SHIFT | its index among those that the task kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from data_prep.executor import work_files
from data_prep.executor.work_files import BuildJob
from data_prep.tokens.encoder import Encoded

TASK_SHIFT = 32
# bytes of text in a unit, within which random sentences are drawn
UNIT_BYTES = 8 << 20
DOCUMENT = np.dtype(
    [
        ("hash", "<u8"),
        ("bytes", "<u4"),
        ("sentences", "<u4"),
        ("tokens", "<u4"),
        ("paragraphs", "<u4"),
        ("source", "u1"),
    ]
)
PARAGRAPH = np.dtype([("hash", "<u8"), ("sentences", "<u4")])
# a key to group by, and the number of its document or paragraph
KEYED = np.dtype([("key", "<u8"), ("number", "<u8")])


def keyed(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """KEYED records from keys uint64 [n] and numbers uint64 [n]."""
    records = np.empty(len(keys), KEYED)
    records["key"], records["number"] = keys, numbers
    return records


def numbers(task: int, first: int, count: int) -> np.ndarray:
    """uint64 [count]: numbers of the documents or paragraphs of a task from index `first` on."""
    return np.arange(first, first + count, dtype=np.uint64) + np.uint64(task << TASK_SHIFT)


def task_and_index(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(task, index in it), both int64 [n], of documents or paragraphs by number, uint64 [n]."""
    indices = numbers & np.uint64((1 << TASK_SHIFT) - 1)
    return (numbers >> np.uint64(TASK_SHIFT)).astype(np.int64), indices.astype(np.int64)


@dataclass(frozen=True)
class KeptDocuments:
    """Documents of a task that later stages use: its corpus, the sentence mask ("" none, keep, trim: see `dedup`), the
    number of held-out tokens, and, if texts are saved, the documents' source files."""

    task: int
    corpus: int
    mask: str
    held_tokens: int
    sources: tuple[str, ...] = field(default=(), repr=False)

    def read_mask(self, job: BuildJob, sentences: int) -> np.ndarray:
        """bool [sentences], false in duplicates."""
        if not self.mask:
            return np.ones(sentences, bool)
        return work_files.read(job, f"{self.mask}-{self.task:07d}.mask", "bool")

    def load(self, job: BuildJob) -> Iterator[tuple[np.ndarray, Encoded]]:
        """(DOCUMENT [d], documents) of each unit; duplicates have size 0."""
        stem = f"read-{self.task:07d}"
        table = work_files.read(job, f"{stem}.documents", DOCUMENT)
        lengths = work_files.read(job, f"{stem}.sentences", "uint32").astype(np.int64)
        tokens = work_files.read(job, f"{stem}.tokens", work_files.id_dtype(job))
        mask = self.read_mask(job, len(lengths))
        documents = unit_edges(table["bytes"])
        sentences = np.append(0, np.cumsum(table["sentences"], dtype=np.int64))[documents]
        places = np.append(0, np.cumsum(lengths))[sentences]
        assert (sentences[-1], places[-1]) == (len(lengths), len(tokens)), f"{stem}: parts do not add up"
        for (d, d_end), (s, s_end), (t, t_end) in zip(
            pairwise(documents), pairwise(sentences), pairwise(places), strict=True
        ):
            unit = Encoded(tokens[t:t_end], lengths[s:s_end], table["sentences"][d:d_end].astype(np.int64))
            yield table[d:d_end], unit.select_sentences(mask[s:s_end])


def unit_edges(sizes: np.ndarray) -> list[int]:
    """Edges of units among documents of `sizes` bytes: the document that reaches UNIT_BYTES is a unit's last."""
    ends, edges = np.append(0, np.cumsum(sizes, dtype=np.int64)), [0]
    while edges[-1] < len(sizes):
        reached = np.searchsorted(ends, ends[edges[-1]] + UNIT_BYTES)
        edges.append(min(int(reached), len(sizes)))
    return edges

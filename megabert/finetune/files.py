"""Every example comes from a line that can be named, and a file that is not what its task says is refused there.

Tables are TSV (GLUE's: no quoting), CSV (quoted as RFC 4180 has it) or JSONL, by their ending or, where that says nothing, by
their first line; tags are CoNLL columns with an empty line between sentences; spans are SQuAD's JSON. All are UTF-8, gzip
where the name ends in .gz.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megabert.finetune.tasks import Task


@dataclass(frozen=True)
class Text:
    """A text or a pair, and its label: a string, a number for a score, None where unlabelled."""

    id: str
    where: str  # file and line, for messages
    a: str
    b: str | None
    label: str | float | None


@dataclass(frozen=True)
class Words:
    """A sentence's words and the tag of each, or None where unlabelled."""

    id: str
    where: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None


@dataclass(frozen=True)
class Question:
    """`answers` are (text, first character in the context) pairs; (): the question has none; None: unlabelled."""

    id: str
    where: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None

    @property
    def impossible(self) -> bool:
        return self.answers == ()


Example = Text | Words | Question


def read(task: Task, path: str | Path, labelled: bool = True) -> list[Example]:
    """The examples of a file. `labelled=False` needs no label column and ignores one that is there.

    Raises ValueError naming file and line for: a column that is missing (and which there are), an empty text, a label that is
    not one of the task's, a score that is no finite number, a line with too few columns, two examples of one id, an answer
    that is not where its context says, a file that is empty or not UTF-8.
    """
    raise NotImplementedError

"""Examples of tasks: what a row, a sentence or a question of a file is read as."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A text or a pair, and its label: a string, several for several, a number for a score, None where unlabelled."""

    id: str
    where: str  # file and line, for messages
    a: str
    b: str | None
    label: str | float | tuple[str, ...] | None


@dataclass(frozen=True)
class Choices:
    """Texts that are compared, each behind the text `a` where there is one; `label` names the right one, of a ranked pair ""
    (the first is better), None where unlabelled."""

    id: str
    where: str
    a: str | None
    options: tuple[str, ...]
    label: str | None


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


Example = Text | Choices | Words | Question

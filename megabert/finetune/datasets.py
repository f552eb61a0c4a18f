"""Data sets of tasks: the examples of a file, each with the line it comes from.

Texts are rows of the tables that `megabert.common.tables` reads; tags are CoNLL columns with an empty line between
sentences; spans are SQuAD's JSON. A file that is not what its task says is refused with file and line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from megabert.common import tables
from megabert.common.logs import log
from megabert.finetune.tasks import PRESETS, Task


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


ENTITY_TAG = re.compile(r"O|[BIES]-.+")
SHOWN = 20  # ids of rows that were left out
ENTITY_METRICS = {"f1", "precision", "recall"}


def read(task: Task, path: str | Path, labelled: bool = True) -> list[Example]:
    """The examples of a file. `labelled=False` needs no label column and ignores one that is there.

    Raises ValueError naming file and line for: a column that is missing (and which there are), an empty text, a label that is
    not one of the task's, a score that is no finite number, a line with too few columns, two examples of one id, an answer
    that is not where its context says, a file that is empty or not UTF-8.
    """
    path = Path(path)
    if not any(line.strip() for _, line in tables.lines(path)):
        raise ValueError(f"{path}: is empty")
    examples: list[Any] = list(READERS.get(task.kind, _texts)(task, path, labelled))
    if not examples:
        raise ValueError(f"{path}: holds no example")
    seen: dict[str, str] = {}
    for example in examples:
        if example.id in seen:
            raise ValueError(f"{example.where}: id {example.id!r} was there before, at {seen[example.id]}")
        seen[example.id] = example.where
    return examples


def for_prediction(task: Task, path: str | Path, text: Sequence[str] = (), identity: str = "") -> Task:
    """The task with the columns of a file that is to be predicted: those that are named, or those of GLUE's test files.

    These begin with a column index or id, and CoLA's have a header that its other files lack.
    """
    if task.kind in ("tag", "span"):
        return replace(task, text=tuple(text) or task.text, id=identity or task.id)
    label = task.label
    header = tables.columns(Path(path)) if task.name in PRESETS else []
    if not text and task.text[0].isdecimal() and "sentence" in header:
        text = ("sentence",)
    text = tuple(text) or task.text
    if text[0].isdecimal() != label.isdecimal():
        label = "0" if text[0].isdecimal() else "label"  # it is not read
    if not identity and not text[0].isdecimal() and header[:1] in (["index"], ["id"]):
        identity = header[0]
    return replace(task, text=text, label=label, id=identity or task.id)


# ---- tables


def _texts(task: Task, path: Path, labelled: bool) -> Iterator[Text]:
    wanted = [*task.text, *([task.label] * labelled), *([task.id] * bool(task.id))]
    left_out: list[str] = []
    for number, (where, row) in enumerate(
        tables.rows(path, wanted, not task.text[0].isdecimal(), task.cut_rows)
    ):
        text = row[: len(task.text)]
        if task.cut_rows and not (row and all(isinstance(t, str) and t.strip() for t in row)):
            left_out.append(str(row[-1]) if row and task.id else str(number))
            continue
        for name, value in zip(wanted, row, strict=True):
            if value is None or (isinstance(value, str) and not value.strip()):
                raise ValueError(f"{where}: column {name!r} is empty; fill it or remove the line")
        for name, value in zip(task.text, text, strict=True):
            if not isinstance(value, str):
                raise ValueError(f"{where}: column {name!r} holds no text but {json.dumps(value):.40}")
        label = _label(task, where, row[len(task.text)]) if labelled else None
        identity = _plain(where, task.id, row[-1]) if task.id else str(number)
        yield Text(identity, where, text[0], text[1] if task.pair else None, label)
    if left_out:
        shown = ", ".join(left_out[:SHOWN]) + ", …" * (len(left_out) > SHOWN)
        log.warning(f"{path}: {len(left_out):,} rows are cut at a tab or a line end and left out: {shown}")


def _label(task: Task, where: str, value: Any) -> str | float:
    if task.kind == "score":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, TypeError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"{where}: score {str(value)!r:.40} in column {task.label!r} is no finite number"
            )
        return number
    label = _plain(where, task.label, value)
    _known(task, where, label)
    return label


def _known(task: Task, where: str, label: str) -> None:
    if task.labels and label not in task.labels:
        raise ValueError(f"{where}: label {label!r:.60} is none of {', '.join(task.labels)}")


def _plain(where: str, column: str, value: Any) -> str:
    """A label or an id as a string; JSONL may have it as a number or true and false."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(
        f"{where}: column {column!r} holds {json.dumps(value):.40}, which is neither text nor a number"
    )


# ---- CoNLL columns


def _sentences(task: Task, path: Path, labelled: bool) -> Iterator[Words]:
    entities = bool(ENTITY_METRICS & set(task.metrics))
    words: list[str] = []
    tags: list[str] = []
    start = number = width = 0
    for line_number, line in chain(tables.lines(path), [(0, "")]):
        fields = line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))
        if not line.strip(" \t"):
            if words:
                yield Words(
                    str(number), f"{path}, line {start}", tuple(words), tuple(tags) if labelled else None
                )
                words, tags, number = [], [], number + 1
            continue
        if fields[0] == "-DOCSTART-":
            continue
        where = f"{path}, line {line_number}"
        width = width or len(fields)
        if len(fields) != width:
            raise ValueError(f"{where}: has {len(fields)} columns, the lines before have {width}")
        if labelled:
            if width < 2:
                raise ValueError(f"{where}: has one column, {fields[0]!r:.40}; a word and its tag are wanted")
            tag = _field(where, "tag", task.label, fields)
            if entities and not ENTITY_TAG.fullmatch(tag):
                raise ValueError(
                    f"{where}: tag {tag!r:.40} is neither O nor B-, I-, E- or S- and a name; metric accuracy takes any"
                )
            _known(task, where, tag)
            tags.append(tag)
        start = start if words else line_number
        words.append(_field(where, "word", task.text[0], fields))


def _field(where: str, what: str, column: str, fields: Sequence[str]) -> str:
    at = int(column)
    if not -len(fields) <= at < len(fields):
        raise ValueError(f"{where}: has {len(fields)} columns, but the {what} is in column {column}")
    if not fields[at].strip(" "):
        raise ValueError(f"{where}: the {what} in column {column} is empty")
    return fields[at]


# ---- SQuAD's JSON


def _questions(task: Task, path: Path, labelled: bool) -> Iterator[Question]:
    tree = tables.parse_json(str(path), "\n".join(line for _, line in tables.lines(path)))
    for a, article in enumerate(_get(str(path), tree, "data", list)):
        for p, paragraph in enumerate(_get(f"{path}, data[{a}]", article, "paragraphs", list)):
            where = f"{path}, data[{a}].paragraphs[{p}]"
            context = _get(where, paragraph, "context", str)
            if not context.strip():
                raise ValueError(f"{where}: its context is empty")
            for qa in _get(where, paragraph, "qas", list):
                yield _question(task, where, context, qa, labelled)


def _question(task: Task, where: str, context: str, qa: Any, labelled: bool) -> Question:
    identity = _get(where, qa, "id", str)
    where = f"{where}, question {identity}"
    question = _get(where, qa, "question", str)
    if not question.strip():
        raise ValueError(f"{where}: the question is empty")
    if not labelled:
        return Question(identity, where, question, context, None)
    answers = []
    for answer in _get(where, qa, "answers", list):
        text, start = _get(where, answer, "text", str), _get(where, answer, "answer_start", int)
        if not 0 <= start <= start + len(text) <= len(context):
            raise ValueError(
                f"{where}: answer {text!r:.40} at {start} is outside its context of {len(context)} characters"
            )
        if context[start : start + len(text)] != text:
            found = context[start : start + len(text)]
            raise ValueError(f"{where}: answer {text!r:.40} is not at {start}, there stands {found!r:.40}")
        if not text.strip():
            raise ValueError(f"{where}: an answer is empty")
        answers.append((text, start))
    if qa.get("is_impossible", False):  # SQuAD 2.0 keeps what looks like an answer apart
        if answers:
            raise ValueError(f"{where}: is_impossible, but it has answers")
        if not task.unanswerable:
            raise ValueError(
                f"{where}: has no answer, and {task.name} knows no such questions; squad2.0 does"
            )
    elif not answers:
        raise ValueError(f"{where}: has no answer and is not marked is_impossible")
    return Question(identity, where, question, context, tuple(answers))


def _get(where: str, node: Any, key: str, kind: type) -> Any:
    found = node.get(key) if isinstance(node, dict) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        names = {list: "list", str: "text", int: "number"}
        raise ValueError(f"{where}: has no {key!r} that is a {names[kind]}, as SQuAD's JSON has")
    return found


READERS: dict[str, Callable[[Task, Path, bool], Iterator[Any]]] = {"span": _questions, "tag": _sentences}

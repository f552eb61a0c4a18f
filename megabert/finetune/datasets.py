"""Datasets of tasks: the examples of a file, each with the line it comes from.

Texts are rows of the tables that `megabert.common.tables` reads; tags are CoNLL columns with an empty line between
sentences, or rows of a table with lists of words and tags; spans are SQuAD's JSON, or rows of a table with its fields. A file that
is not what its task says is refused with file and line.
"""

from __future__ import annotations

import hashlib
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

ENTITY_TAG = re.compile(r"O|[BIES]-.+")
# Ids of left-out rows that a warning lists.
SHOWN = 20
ENTITY_METRICS = {"f1", "precision", "recall"}


@dataclass(frozen=True)
class TextExample:
    """A text or a pair, and its label: a string, several for multilabel, a number for a score, None where unlabelled."""

    id: str
    # File and line, for messages.
    where: str
    a: str
    b: str | None
    label: str | float | tuple[str, ...] | None


@dataclass(frozen=True)
class ChoiceExample:
    """Possible continuations or answers of the text `a`; `label` names the correct one, None where unlabelled."""

    id: str
    where: str
    a: str
    options: tuple[str, ...]
    label: str | None


@dataclass(frozen=True)
class SentenceExample:
    """A sentence's words and the tag of each, or None where unlabelled."""

    id: str
    where: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None


@dataclass(frozen=True)
class QuestionExample:
    """`answers` are (text, first character in the context) pairs; (): the question has none; None: unlabelled."""

    id: str
    where: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None


Example = TextExample | ChoiceExample | SentenceExample | QuestionExample


def read(task: Task, path: str | Path, labelled: bool = True) -> list[Any]:
    """The examples of a file, of the class of the task's kind. `labelled=False` needs no label column and ignores one.

    Raises ValueError naming file and line for: a column that is missing (and which exist), an empty text, a label that is
    not one of the task's, a score that is not a finite number, a line with too few columns, two examples of one id, an answer
    that is not where its context says, a file that is empty or not UTF-8.
    """
    return list(stream(task, path, labelled))


def stream(task: Task, path: str | Path, labelled: bool = True) -> Iterator[Any]:
    """The examples of a file one after another, which need not fit in memory; errors as of `read`, when they are reached."""
    path = Path(path)
    if not tables.is_arrow(path) and not any(line.strip() for _, line in tables.lines(path)):
        raise ValueError(f"{path}: is empty")
    has_ids = bool(task.id) or task.kind == "span"
    seen: dict[str, str] = {}
    empty = True
    for example in READERS.get(task.kind, _texts)(task, path, labelled):
        if has_ids and example.id in seen:
            raise ValueError(f"{example.where}: id {example.id!r} was used before, at {seen[example.id]}")
        if has_ids:
            seen[example.id] = example.where
        empty = False
        yield example
    if empty:
        raise ValueError(f"{path}: holds no example")


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the files of a saved dataset one after the other."""
    sha256 = hashlib.sha256()
    for part in tables.files(path):
        with part.open("rb") as file:
            while data := file.read(1 << 20):
                sha256.update(data)
    return sha256.hexdigest()


def for_prediction(
    task: Task, path: str | Path, text: Sequence[str] = (), identity: str = "", choices: Sequence[str] = ()
) -> Task:
    """The task with the columns of a file without labels: those that are named, or those of GLUE's test files.

    GLUE's test files begin with a column index or id, and CoLA's has a header that its other files lack.
    """
    header = tables.columns(Path(path)) if task.name in PRESETS and task.kind in ("classify", "score") else []
    if not text and task.text and task.text[0].isdecimal() and "sentence" in header:
        text = ("sentence",)
    text, choices = tuple(text) or task.text, tuple(choices) or task.choices
    if not identity and header[:1] in (["index"], ["id"]) and not text[0].isdecimal():
        identity = header[0]
    label = _unread_label(task.label, (*text, *choices))
    return replace(task, text=text, choices=choices, label=label, id=identity or task.id)


def _unread_label(label: str, columns: Sequence[str]) -> str:
    """A label column that is not read, a number or a name as the `columns` are; "" where the task has none."""
    numbered = [column.removeprefix("-").isdecimal() for column in (label, *columns)]
    if not label or numbered[0] == numbered[1]:
        return label
    return "0" if numbered[1] else "label"


# ---- tables


def _texts(task: Task, path: Path, labelled: bool) -> Iterator[TextExample | ChoiceExample]:
    wanted = task.columns(labelled)
    texts = len(task.text) + len(task.choices)
    may_be_empty = [task.label] if task.kind == "multilabel" else []
    left_out: list[str] = []
    for number, (where, row) in enumerate(tables.rows(path, wanted, not wanted[0].isdecimal(), task.cut_rows)):
        if task.cut_rows and not (row and all(isinstance(t, str) and t.strip() for t in row)):
            left_out.append(str(row[-1]) if row and task.id else str(number))
            continue
        for name, value in zip(wanted, row, strict=True):
            if name not in may_be_empty and (value is None or (isinstance(value, str) and not value.strip())):
                raise ValueError(f"{where}: column {name!r} is empty; fill it or remove the line")
        for name, value in zip(wanted[:texts], row[:texts], strict=True):
            if not isinstance(value, str):
                raise ValueError(f"{where}: column {name!r} holds no text but {json.dumps(value):.40}")
        identity = _plain(where, task.id, row[-1]) if task.id else str(number)
        label: Any = _label(task, where, row[texts]) if labelled else None
        a, *others = row[:texts]
        if task.kind == "choose":
            # A second text is the beginning of every choice.
            begin = f"{others.pop(0)} " if task.pair else ""
            yield ChoiceExample(identity, where, a, tuple(begin + option for option in others), label)
        else:
            yield TextExample(identity, where, a, others[0] if others else None, label)
    if left_out:
        shown = ", ".join(left_out[:SHOWN]) + (", …" if len(left_out) > SHOWN else "")
        log.warning(f"{path}: {len(left_out):,} rows are cut at a tab or a line end and left out: {shown}")


def _label(task: Task, where: str, value: Any) -> str | float | tuple[str, ...]:
    if task.kind == "multilabel":
        return _label_set(task, where, value)
    if task.kind == "score":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, TypeError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: score {str(value)!r:.40} in column {task.label!r} is not a finite number")
        return number
    label = _plain(where, task.label, value)
    _known(task, where, label)
    if task.kind == "choose" and label not in task.choice_labels:
        raise ValueError(f"{where}: label {label!r:.60} is none of {', '.join(task.choice_labels)}")
    return label


def _label_set(task: Task, where: str, value: Any) -> tuple[str, ...]:
    """A list of labels, or a text of them with commas between; the empty set is allowed."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif not isinstance(value, list):
        value = [] if value is None else [value]
    labels = tuple(_plain(where, task.label, part) for part in value)
    for label in labels:
        _known(task, where, label)
    return labels


def _known(task: Task, where: str, label: str) -> None:
    if task.labels and label not in task.labels:
        raise ValueError(f"{where}: label {label!r:.60} is none of {', '.join(task.labels)}")


def _plain(where: str, column: str, value: Any) -> str:
    """A label or an id as a string; JSONL may have it as a number or true and false."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"{where}: column {column!r} holds {json.dumps(value):.40}, which is neither text nor a number")


# ---- words and tags


def _word_rows(task: Task, path: Path, labelled: bool) -> Iterator[SentenceExample]:
    """Rows with a list of words and a list of tags."""
    wanted = [task.text[0], *([task.label] * labelled)]
    for number, (where, row) in enumerate(tables.rows(path, wanted)):
        for name, values in zip(wanted, row, strict=True):
            if not isinstance(values, list) or not values:
                raise ValueError(f"{where}: column {name!r} holds no list but {values!r:.40}")
        words = tuple(_plain(where, task.text[0], word) for word in row[0])
        if not all(word.strip() for word in words):
            raise ValueError(f"{where}: a word in column {task.text[0]!r} is empty")
        tags = tuple(_tag(task, where, _plain(where, task.label, tag)) for tag in row[1]) if labelled else None
        if tags is not None and len(tags) != len(words):
            raise ValueError(f"{where}: has {len(words)} words and {len(tags)} tags")
        yield SentenceExample(str(number), where, words, tags)


def _tag(task: Task, where: str, tag: str) -> str:
    if ENTITY_METRICS & set(task.metrics) and not ENTITY_TAG.fullmatch(tag):
        raise ValueError(
            f"{where}: tag {tag!r:.40} is neither O nor B-, I-, E- or S- and a name; metric accuracy takes any"
        )
    _known(task, where, tag)
    return tag


def _sentences(task: Task, path: Path, labelled: bool) -> Iterator[SentenceExample]:
    if not task.text[0].removeprefix("-").isdecimal():
        yield from _word_rows(task, path, labelled)
        return
    if tables.is_arrow(path):
        raise ValueError(f"{path}: is a table; name its columns of words and tags with --text and --label")
    words: list[str] = []
    tags: list[str] = []
    start = number = width = 0
    for line_number, line in chain(tables.lines(path), [(0, "")]):
        fields = line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))
        if not line.strip(" \t"):
            if words:
                yield SentenceExample(
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
                raise ValueError(f"{where}: has one column, {fields[0]!r:.40}; a word and its tag are needed")
            tags.append(_tag(task, where, _field(where, "tag", task.label, fields)))
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


def _questions(task: Task, path: Path, labelled: bool) -> Iterator[QuestionExample]:
    if tables.is_arrow(path):
        yield from _question_rows(task, path, labelled)
        return
    tree = tables.parse_json(str(path), "\n".join(line for _, line in tables.lines(path)))
    for a, article in enumerate(_get(str(path), tree, "data", list)):
        for p, paragraph in enumerate(_get(f"{path}, data[{a}]", article, "paragraphs", list)):
            where = f"{path}, data[{a}].paragraphs[{p}]"
            context = _get(where, paragraph, "context", str)
            if not context.strip():
                raise ValueError(f"{where}: its context is empty")
            for qa in _get(where, paragraph, "qas", list):
                yield _question(task, where, context, qa, labelled)


def _question_rows(task: Task, path: Path, labelled: bool) -> Iterator[QuestionExample]:
    """SQuAD's fields as columns, as `datasets` has it; no answer in the list is none."""
    wanted = ["id", "question", "context", *["answers.text", "answers.answer_start"] * labelled]
    for where, row in tables.rows(path, wanted):
        qa: dict[str, Any] = {"id": row[0], "question": row[1]}
        if not (isinstance(row[2], str) and row[2].strip()):
            raise ValueError(f"{where}: its context is empty")
        if labelled:
            texts, starts = row[3] or [], row[4] or []
            if len(texts) != len(starts):
                raise ValueError(f"{where}: has {len(texts)} answers and {len(starts)} places of answers")
            qa["answers"] = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
            qa["is_impossible"] = not texts
        yield _question(task, where, row[2], qa, labelled)


def _question(task: Task, where: str, context: str, qa: Any, labelled: bool) -> QuestionExample:
    identity = _get(where, qa, "id", str)
    where = f"{where}, question {identity}"
    question = _get(where, qa, "question", str)
    if not question.strip():
        raise ValueError(f"{where}: the question is empty")
    if not labelled:
        return QuestionExample(identity, where, question, context, None)
    answers = []
    for answer in _get(where, qa, "answers", list):
        text, start = _get(where, answer, "text", str), _get(where, answer, "answer_start", int)
        if not 0 <= start <= start + len(text) <= len(context):
            raise ValueError(
                f"{where}: answer {text!r:.40} at {start} is outside its context of {len(context)} characters"
            )
        if context[start : start + len(text)] != text:
            there = context[start : start + len(text)]
            raise ValueError(f"{where}: answer {text!r:.40} is not at {start}, which holds {there!r:.40}")
        if not text.strip():
            raise ValueError(f"{where}: an answer is empty")
        answers.append((text, start))
    if qa.get("is_impossible", False):  # SQuAD 2.0 keeps what looks like an answer apart
        if answers:
            raise ValueError(f"{where}: is_impossible, but it has answers")
        if not task.unanswerable:
            raise ValueError(f"{where}: has no answer, which {task.name} does not allow; squad2.0 does")
    elif not answers:
        raise ValueError(f"{where}: has no answer and is not marked is_impossible")
    return QuestionExample(identity, where, question, context, tuple(answers))


def _get(where: str, node: Any, key: str, kind: type) -> Any:
    value = node.get(key) if isinstance(node, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "list", str: "text", int: "number"}
        raise ValueError(f"{where}: has no {key!r} that is a {names[kind]}, as SQuAD's JSON has")
    return value


READERS: dict[str, Callable[[Task, Path, bool], Iterator[Any]]] = {"span": _questions, "tag": _sentences}

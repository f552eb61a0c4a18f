"""Data sets of tasks: the examples of a file, each with the line it comes from.

Texts are rows of the tables that `megabert.common.tables` reads; tags are CoNLL columns with an empty line between
sentences, or rows of a table with lists of words and tags; spans are SQuAD's JSON, or rows of a table with its fields. A file
that is not what its task says is refused with file and line.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common import arrow_tables, tables
from megabert.common.logs import log
from megabert.finetune.examples import Choices, Example, Question, Text, Words
from megabert.finetune.tasks import COMPARED, PRESETS, Task

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
    _refuse_empty(path)
    examples: list[Any] = list(READERS.get(task.kind, _texts)(task, path, labelled))
    if not examples:
        raise ValueError(f"{path}: holds no example")
    _refuse_twice(examples)
    return examples


def _refuse_empty(path: Path) -> None:
    if not arrow_tables.is_table(path) and not any(line.strip() for _, line in tables.lines(path)):
        raise ValueError(f"{path}: is empty")


def _refuse_twice(examples: Iterable[Any]) -> None:
    seen: dict[str, str] = {}
    for example in examples:
        if example.id in seen:
            raise ValueError(f"{example.where}: id {example.id!r} was there before, at {seen[example.id]}")
        seen[example.id] = example.where


def count(task: Task, path: str | Path) -> int:
    """The number of examples of a file whose labels are not read; errors as of `read`. Of a table, whatever its size, in 8
    bytes an example that has an id."""
    path, found, hashes = Path(path), 0, array("q")
    _refuse_empty(path)
    for example in READERS.get(task.kind, _texts)(task, path, False):
        found += 1
        if task.id or task.kind == "span":
            hashes.append(hash(example.id))
    if not found:
        raise ValueError(f"{path}: holds no example")
    ordered = np.sort(np.frombuffer(hashes, np.int64))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if suspects:
        _refuse_twice(example for example in stream(task, path) if hash(example.id) in suspects)
    return found


def stream(task: Task, path: str | Path) -> Iterator[Any]:
    """The examples of a file that was counted, one after the other."""
    reader = READERS.get(task.kind, partial(_texts, warn=False))
    return reader(task, Path(path), False)


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the files of a saved dataset one after the other."""
    found = hashlib.sha256()
    for part in arrow_tables.files(path) if path.is_dir() else [path]:
        with part.open("rb") as file:
            while data := file.read(1 << 20):
                found.update(data)
    return found.hexdigest()


def for_prediction(
    task: Task, path: str | Path, text: Sequence[str] = (), identity: str = "", choices: Sequence[str] = ()
) -> Task:
    """The task with the columns of a file that is to be predicted: those that are named, or those of GLUE's test files.

    These begin with a column index or id, and CoLA's have a header that its other files lack. `choices` may be any number of
    texts that are to be ranked.
    """
    if task.kind in ("tag", "span", *COMPARED):
        text, choices = tuple(text) or task.text, tuple(choices) or task.choices
        label = _unread(task.label, (*text, *choices))
        return replace(task, text=text, choices=choices, label=label, id=identity or task.id)
    header = tables.columns(Path(path)) if task.name in PRESETS else []
    if not text and task.text[0].isdecimal() and "sentence" in header:
        text = ("sentence",)
    text = tuple(text) or task.text
    if not identity and not text[0].isdecimal() and header[:1] in (["index"], ["id"]):
        identity = header[0]
    return replace(task, text=text, label=_unread(task.label, text), id=identity or task.id)


def _unread(label: str, columns: Sequence[str]) -> str:
    """A label column that is not read: as a number or a name, as the `columns` are; "" where the task has none."""
    numbered = [column.removeprefix("-").isdecimal() for column in (label, *columns)]
    if not label or numbered[0] == numbered[1]:
        return label
    return "0" if numbered[1] else "label"


# ---- tables


def _texts(task: Task, path: Path, labelled: bool, warn: bool = True) -> Iterator[Text | Choices]:
    if task.kind == "rank" and labelled and len(task.choices) != 2:
        raise ValueError(
            f"task {task.name}: learns from two texts a line, the better one first; {len(task.choices)} are named"
        )
    wanted = task.columns(labelled)
    texts = len(task.text) + len(task.choices)
    may_be_empty = [task.label] * (task.kind == "multilabel")
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
        label = _label(task, where, row[texts]) if labelled and task.label else None
        if task.kind in COMPARED:
            yield _choices(task, identity, where, row[:texts], "" if task.kind == "rank" and labelled else label)
        else:
            yield Text(identity, where, row[0], row[1] if task.pair else None, label)
    if left_out and warn:
        shown = ", ".join(left_out[:SHOWN]) + ", …" * (len(left_out) > SHOWN)
        log.warning(f"{path}: {len(left_out):,} rows are cut at a tab or a line end and left out: {shown}")


def _choices(task: Task, identity: str, where: str, texts: Sequence[str], label: Any) -> Choices:
    """A second text is the beginning of every choice."""
    given, options = texts[: len(task.text)], texts[len(task.text) :]
    if task.pair:
        options = [f"{given[1]} {option}" for option in options]
    return Choices(identity, where, given[0] if given else None, tuple(options), label)


def _label(task: Task, where: str, value: Any) -> str | float | tuple[str, ...]:
    if task.kind == "multilabel":
        return _several(task, where, value)
    if task.kind == "score":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, TypeError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: score {str(value)!r:.40} in column {task.label!r} is no finite number")
        return number
    label = _plain(where, task.label, value)
    _known(task, where, label)
    if task.kind == "choose" and label not in choice_labels(task):
        raise ValueError(f"{where}: label {label!r:.60} is none of {', '.join(choice_labels(task))}")
    return label


def _several(task: Task, where: str, value: Any) -> tuple[str, ...]:
    """A list of labels, or a text of them with commas between; none is a label too."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif not isinstance(value, list):
        value = [] if value is None else [value]
    found = tuple(_plain(where, task.label, part) for part in value)
    for label in found:
        _known(task, where, label)
    return found


def choice_labels(task: Task) -> tuple[str, ...]:
    """What the choices are called in the label column: as the task says, or by their numbers from 0."""
    return task.labels or tuple(str(number) for number in range(len(task.choices)))


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


def _word_rows(task: Task, path: Path, labelled: bool) -> Iterator[Words]:
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
        yield Words(str(number), where, words, tags)


def _tag(task: Task, where: str, tag: str) -> str:
    if ENTITY_METRICS & set(task.metrics) and not ENTITY_TAG.fullmatch(tag):
        raise ValueError(
            f"{where}: tag {tag!r:.40} is neither O nor B-, I-, E- or S- and a name; metric accuracy takes any"
        )
    _known(task, where, tag)
    return tag


def _sentences(task: Task, path: Path, labelled: bool) -> Iterator[Words]:
    if not task.text[0].removeprefix("-").isdecimal():
        yield from _word_rows(task, path, labelled)
        return
    if arrow_tables.is_table(path):
        raise ValueError(f"{path}: is a table; name its columns of words and tags with --text and --label")
    words: list[str] = []
    tags: list[str] = []
    start = number = width = 0
    for line_number, line in chain(tables.lines(path), [(0, "")]):
        fields = line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))
        if not line.strip(" \t"):
            if words:
                yield Words(str(number), f"{path}, line {start}", tuple(words), tuple(tags) if labelled else None)
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


def _questions(task: Task, path: Path, labelled: bool) -> Iterator[Question]:
    if arrow_tables.is_table(path):
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


def _question_rows(task: Task, path: Path, labelled: bool) -> Iterator[Question]:
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
            raise ValueError(f"{where}: has no answer, and {task.name} knows no such questions; squad2.0 does")
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

"""Every example comes from a line that can be named, and a file that is not what its task says is refused there.

Tables are TSV (GLUE's: no quoting), CSV (quoted as RFC 4180 has it) or JSONL, by their ending or, where that says nothing, by
their first line; tags are CoNLL columns with an empty line between sentences; spans are SQuAD's JSON. All are UTF-8, gzip
where the name ends in .gz.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


ENTITY_TAG = re.compile(r"O|[BIES]-.+")
ENTITY_METRICS = {"f1", "precision", "recall"}


def read(task: Task, path: str | Path, labelled: bool = True) -> list[Example]:
    """The examples of a file. `labelled=False` needs no label column and ignores one that is there.

    Raises ValueError naming file and line for: a column that is missing (and which there are), an empty text, a label that is
    not one of the task's, a score that is no finite number, a line with too few columns, two examples of one id, an answer
    that is not where its context says, a file that is empty or not UTF-8.
    """
    path = Path(path)
    content = _content(path)
    if task.kind == "span":
        examples: list[Any] = list(_questions(task, path, content, labelled))
    elif task.kind == "tag":
        examples = list(_sentences(task, path, content, labelled))
    else:
        examples = list(_texts(task, path, content, labelled))
    if not examples:
        raise ValueError(f"{path}: holds no example")
    seen: dict[str, str] = {}
    for example in examples:
        if example.id in seen:
            raise ValueError(f"{example.where}: id {example.id!r} was there before, at {seen[example.id]}")
        seen[example.id] = example.where
    return examples


def _content(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder; name a file in it") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: is not a whole gzip file ({error})") from None
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: is not UTF-8; convert the file, e.g. with iconv") from None
    if not content.strip():
        raise ValueError(f"{path}: is empty")
    return content


def _lines(content: str) -> list[str]:
    """Lines end in LF or CRLF; other line ends of Unicode's are text."""
    return [line.removesuffix("\r") for line in content.rstrip("\r\n").split("\n")]


# ---- tables


def _texts(task: Task, path: Path, content: str, labelled: bool) -> Iterator[Text]:
    wanted = [*task.text, *([task.label] * labelled), *([task.id] * bool(task.id))]
    number = 0
    for where, row in _rows(task, path, content, wanted):
        text = row[: len(task.text)]
        if task.cut_rows and not (all(isinstance(t, str) and t.strip() for t in row)):
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
        number += 1


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


def _rows(task: Task, path: Path, content: str, wanted: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """(file and line, the wanted columns' values) of each row; None for a value that is not there."""
    start = content[: content.find("\n") if "\n" in content else None]
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")) or (start.startswith("{") and not name.endswith((".tsv", ".csv"))):
        yield from _json_rows(path, content, wanted)
        return
    if name.endswith(".csv") or ("\t" not in start and not name.endswith(".tsv")):
        reader = csv.reader(io.StringIO(content, newline=""), strict=True)
        rows = _csv_rows(path, reader)
    else:
        rows = ((n, line.split("\t")) for n, line in enumerate(_lines(content), 1))
    headed = not task.text[0].isdecimal()
    _, header = next(rows) if headed else (0, [])
    columns: list[int] = []
    width = len(header)
    for number, row in rows:
        if not columns:
            width = width or len(row)
            columns = [_column(path, column, header, width) for column in wanted]
        where = f"{path}, line {number}"
        if len(row) != width:
            if task.cut_rows:
                continue
            raise ValueError(
                f"{where}: has {len(row)} columns, the {'header' if headed else 'first line'} has {width}"
            )
        yield where, [row[i] for i in columns]


def _csv_rows(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, fields) of each row."""
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {number}: is not CSV ({error})") from None
        if row is None:
            return
        if row:  # a line without anything on it
            yield number, row


def _column(path: Path, column: str, header: Sequence[str], width: int) -> int:
    if not header:
        if int(column) >= width:
            raise ValueError(f"{path}: no column {column}; its first line has columns 0 to {width - 1}")
        return int(column)
    found = [i for name in column.split("|") for i, h in enumerate(header) if h.strip() == name]
    if not found:
        raise ValueError(f"{path}: no column {column!r}; its columns are {', '.join(header):.300}")
    return found[0]


def _json_rows(path: Path, content: str, wanted: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    for number, line in enumerate(_lines(content), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = _json(where, line)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: is no JSON object")
        values = []
        for column in wanted:
            keys = [key for key in column.split("|") if key in row]
            if not keys:
                raise ValueError(f"{where}: no column {column!r}; its columns are {', '.join(row)}")
            values.append(row[keys[0]])
        yield where, values


def _json(where: str, text: str) -> Any:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not JSON ({error})") from None
    if re.search(r"\\u[dD][89a-fA-F]", text):  # may be half a surrogate pair, which is no character
        try:
            json.dumps(tree, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where}: holds {half!a}, half a character") from None
    return tree


# ---- CoNLL columns


def _sentences(task: Task, path: Path, content: str, labelled: bool) -> Iterator[Words]:
    entities = bool(ENTITY_METRICS & set(task.metrics))
    words: list[str] = []
    tags: list[str] = []
    start = number = width = 0
    for line_number, line in enumerate([*_lines(content), ""], 1):
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


def _questions(task: Task, path: Path, content: str, labelled: bool) -> Iterator[Question]:
    tree = _json(str(path), content)
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

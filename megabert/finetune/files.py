"""Files of tasks: their examples, each with its place for messages.

Texts are rows of tables (`megabert.common.tables`); tags are CoNLL columns with an empty line between sentences, or JSON lines of a
text and labelled spans of its characters; answers are SQuAD's JSON. Errors name the file and the line.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megabert.common import tables
from megabert.common.logs import log
from megabert.finetune.offsets import find_words
from megabert.finetune.tasks import RANKING_METRICS, Task

ENTITY_TAG = re.compile(r"O|[BIES]-.+")
# a list as text: of quoted labels, of numbers, or of several values; not a label in brackets
LIST = re.compile(r"\s*\[\s*(['\"].*|[\d.-][^\[\]]*|[^\[\]]*,[^\[\]]*)?\]\s*")


@dataclass(frozen=True)
class TextExample:
    """A text or a pair, and its label: a string, several for multilabel, a number for a score, None if unlabelled."""

    id: str
    # File and line, for messages.
    where: str
    a: str
    b: str | None
    label: str | float | tuple[str, ...] | None


@dataclass(frozen=True)
class SentenceExample:
    """A sentence's words and their tags, None if unlabelled; for a plain text also the text and the first character of each word, and
    one past the last."""

    id: str
    where: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    text: str = ""
    places: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class QuestionExample:
    """`answers` are pairs of text and first character in the context; (): no answer; None: unlabelled."""

    id: str
    where: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None


Example = TextExample | SentenceExample | QuestionExample


def read(task: Task, path: str | Path, labelled: bool = True) -> list[Any]:
    """The examples of a file, of the class for the task's kind. `labelled=False` ignores a label column and needs none.

    Raises ValueError naming file and line for: a missing column (with the existing ones), an empty text, an unknown label, a score
    that is not a finite number, a line with too few columns, a repeated id, an answer that is not at its offset in the context, a
    file that is empty or not UTF-8.
    """
    return list(stream(task, Path(path), labelled))


def stream(task: Task, path: Path, labelled: bool = True, lines: bool = False) -> Iterator[Any]:
    """The examples of a file one by one, in the memory of its ids if it has any; errors as of `read`, when they are reached. With `lines` each non-empty
    line of the file is an unlabelled text."""
    readers: dict[str, Any] = {"span": _questions, "tag": _sentences}
    reader = readers.get(task.kind, _texts)
    if lines:
        reader = _lines
    elif task.kind == "tag" and Path(path.name.removesuffix(".gz")).suffix in (".jsonl", ".json"):
        reader = _plain_sentences
    seen: dict[str, str] = {}
    example = None
    for example in reader(task, path, labelled):
        if task.id or task.kind == "span":
            if example.id in seen:
                raise ValueError(f"{example.where}: id {example.id!r} was used before, at {seen[example.id]}")
            seen[example.id] = example.where
        yield example
    if example is None:
        raise ValueError(f"{path}: holds no example")


def has_ids(task: Task, name: str, path: Path) -> bool:
    """Whether an unlabelled file has the id column `name` beside its texts."""
    if not name:
        return False
    try:
        next(_rows(task, path, [*task.text, name]), None)
    except ValueError:
        return False
    return True


def _lines(task: Task, path: Path, labelled: bool) -> Iterator[TextExample | SentenceExample]:
    if task.pair or task.kind == "span":
        raise ValueError(f"{path}: --lines is of one text each, and {task.name} reads two")
    texts = ((f"{path}, line {number}", line) for number, line in tables.lines(path) if line.strip())
    for count, (where, text) in enumerate(texts):
        plain = TextExample(str(count), where, text, None, None)
        yield _sentence(str(count), where, text) if task.kind == "tag" else plain


# ---- tables


def _rows(task: Task, path: Path, columns: list[str]) -> Iterator[tuple[str, list[Any]]]:
    return tables.rows(path, columns, headed=False, cut_rows=task.cut_rows, ragged=task.ragged)


def _texts(task: Task, path: Path, labelled: bool) -> Iterator[TextExample]:
    columns = wanted = task.columns(labelled)
    if task.kind == "score" and task.pair and not labelled:
        # a list of negatives is of texts too; where there is no such column, the texts once more
        columns = [*wanted, f"{task.label}|{task.text[1]}"]
    may_be_empty = task.label if labelled and task.kind == "multilabel" else None
    cut = count = dropped = 0
    for number, (where, row) in enumerate(_rows(task, path, columns)):
        if task.cut_rows and not (row and all(cell is not None and str(cell).strip() for cell in row)):
            cut += 1
            continue
        cells = dict(zip(wanted, row, strict=False))
        values = row[-1] if len(row) > len(wanted) else cells.get(task.label)
        a, b = (*(cells[name] for name in task.text), None)[:2]
        if task.kind == "score" and isinstance(b, list):
            if task.id:
                raise ValueError(f"{where}: --id {task.id}: a list of texts has no ids; give one text a line")
            ranked, same = _ranked(where, a, b, values, labelled)
            dropped += same
            for text, value in ranked:
                _refuse_negative(task, where, value)
                yield TextExample(str(count), where, a, text, value)
                count += 1
            continue
        for name, value in cells.items():
            if name != may_be_empty and (value is None or (isinstance(value, str) and not value.strip())):
                raise ValueError(f"{where}: column {name!r} is empty; fill it or remove the line")
            if name in task.text and not isinstance(value, str):
                raise ValueError(f"{where}: column {name!r} holds no text but {json.dumps(value, default=repr):.40}")
        identity = _plain(where, task.id, cells[task.id]) if task.id else str(number)
        label = _label(task, where, cells[task.label]) if labelled else None
        _refuse_negative(task, where, label)
        yield TextExample(identity, where, a, b, label)
    if cut:
        log.warning(f"{path}: {cut:,} rows are cut at a tab or a line end and left out")
    if dropped:
        log.warning(f"{path}: {dropped:,} negatives are the query or one of its positives, and left out")


def _refuse_negative(task: Task, where: str, value: Any) -> None:
    if isinstance(value, float) and value < 0 and set(RANKING_METRICS) & set(task.metrics):
        raise ValueError(f"{where}: score {value}: ndcg and mrr take scores of 0, not relevant, and above")


def _ranked(
    where: str, query: Any, texts: list[Any], values: Any, labelled: bool
) -> tuple[list[tuple[str, float | None]], int]:
    """(each text of a query with its score, the number of dropped negatives): `values` are the scores, or negatives with score 0 while
    `texts` have 1. Negatives that equal the query or a positive are dropped. Unlabelled, negatives are texts."""
    named = all(isinstance(one, str) and one.strip() for one in [query, *texts])
    if not (texts and named and (isinstance(values, list) or not labelled)):
        raise ValueError(f"{where}: is not a query, a list of its texts, and a list of their scores or of negatives")
    if isinstance(values, list) and values and all(isinstance(one, str) and one.strip() for one in values):
        negatives = [text for text in values if text not in (query, *texts)]
        pairs: list[tuple[str, float | None]] = [*((text, 1.0) for text in texts), *((text, 0.0) for text in negatives)]
        same = 0 if values is texts else len(values) - len(negatives)
        return (pairs, same) if labelled else ([(text, None) for text, _ in pairs], same)
    if not labelled:
        return [(text, None) for text in texts], 0
    finite = all(type(one) in (int, float) and abs(one) <= sys.float_info.max for one in values)
    if len(values) == len(texts) and finite:
        return list(zip(texts, map(float, values), strict=True)), 0
    raise ValueError(f"{where}: has {len(values)} scores of {len(texts)} texts, or some that are not finite numbers")


def _label(task: Task, where: str, value: Any) -> str | float | tuple[str, ...]:
    if task.kind == "multilabel":
        # A list of labels, or a text of labels separated by commas; it may be empty.
        if isinstance(value, str) and LIST.fullmatch(value):
            raise ValueError(f"{where}: {value!r:.40} is a list as text; write a,b, or JSON lines with a list")
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif not isinstance(value, list):
            value = [] if value is None else [value]
        labels = [_plain(where, task.label, part) for part in value]
        if joined := next((label for label in labels if "," in label), None):
            raise ValueError(f"{where}: label {joined!r:.60} holds a comma, which separates labels; replace it")
        known = tuple(_known(task, where, label) for label in labels)
        if twice := next((label for label in known if known.count(label) > 1), None):
            each = "a list holds names of labels, each once, not 0 and 1 for each label"
            raise ValueError(f"{where}: label {twice!r:.60} twice in column {task.label!r}: {each}")
        return known
    if task.kind == "score":
        try:
            # `float` reads True as 1 and 1_0 as 10
            number = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: score {str(value)!r:.40} in column {task.label!r} is not a finite number")
        return number
    return _known(task, where, _plain(where, task.label, value))


def _known(task: Task, where: str, label: str) -> str:
    label = task.find_label(label)
    if task.labels and label not in task.labels:
        raise ValueError(f"{where}: label {label!r:.60} is none of {', '.join(task.labels)}")
    return label


def _plain(where: str, column: str, value: Any) -> str:
    """A label or an id as a string; in JSONL it may be a number, true or false. 1.0 is the number 1."""
    if isinstance(value, str):
        if any(end in value for end in "\t\n\r"):
            raise ValueError(f"{where}: column {column!r} holds {value!r:.40}, with a tab or a line end; remove it")
        return value.strip()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: column {column!r} holds {value}; fill it or remove the line")
    if isinstance(value, bool | int | float):
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        return json.dumps(int(value) if whole else value)
    raise ValueError(
        f"{where}: column {column!r} holds {json.dumps(value, default=repr):.40}, which is neither text nor a number"
    )


# ---- words and tags


def _sentences(task: Task, path: Path, labelled: bool) -> Iterator[SentenceExample]:
    width = count = 0
    for blank, block in groupby(tables.lines(path), lambda numbered: not numbered[1].strip(" \t")):
        lines = [] if blank else [(f"{path}, line {number}", _columns(line)) for number, line in block]
        rows = [(where, columns) for where, columns in lines if columns[0] != "-DOCSTART-"]
        words, tags = [], []
        for where, columns in rows:
            width = width or len(columns)
            if len(columns) != width:
                raise ValueError(f"{where}: has {len(columns)} columns, the lines before have {width}")
            words.append(_field(where, "word", task.text[0], columns))
            if labelled:
                tags.append(_tag(task, where, columns))
        if rows:
            yield SentenceExample(str(count), rows[0][0], tuple(words), tuple(tags) if labelled else None)
            count += 1


def _columns(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))


def _field(where: str, what: str, column: str, columns: Sequence[str]) -> str:
    at = int(column)
    if not -len(columns) <= at < len(columns):
        raise ValueError(f"{where}: has {len(columns)} columns, but the {what} is in column {column}")
    if not columns[at].strip(" "):
        raise ValueError(f"{where}: the {what} in column {column} is empty")
    return columns[at]


def _tag(task: Task, where: str, columns: Sequence[str]) -> str:
    if len(columns) < 2:
        raise ValueError(f"{where}: has one column, {columns[0]!r:.40}; a word and its tag are needed")
    tag = _field(where, "tag", task.label, columns)
    if task.of_entities and not ENTITY_TAG.fullmatch(tag):
        rule = "neither O nor B-, I-, E- or S- and a name; metric accuracy takes any"
        raise ValueError(f"{where}: tag {tag!r:.40} is {rule}")
    return _known(task, where, tag)


def _plain_sentences(task: Task, path: Path, labelled: bool) -> Iterator[SentenceExample]:
    """JSON lines of `text` and `spans`, objects of `start`, `end` (one past its last character) and `label`. A span that begins
    or ends inside a word is extended to it."""
    widened = 0
    columns = ["text", "spans"] if labelled else ["text"]
    for count, (where, (text, *spans)) in enumerate(tables.rows(path, columns)):
        tables.read_text(text, where)
        sentence = _sentence(str(count), where, text)
        if spans:
            tags, wider = _tags_of_spans(sentence, spans[0])
            widened += wider
            sentence = replace(sentence, tags=tuple(_known(task, where, tag) for tag in tags))
        yield sentence
    if widened:
        log.warning(f"{path}: {widened:,} spans begin or end inside a word and are widened to it")


def _sentence(identity: str, where: str, text: str) -> SentenceExample:
    places = find_words(text)
    if not places:
        raise ValueError(f"{where}: has no word in it")
    words = tuple(text[start:end] for start, end in places)
    return SentenceExample(identity, where, words, None, text, tuple(places))


def _tags_of_spans(sentence: SentenceExample, spans: Any) -> tuple[list[str], int]:
    """(B-, I- or O for each word, number of extended spans). Raises ValueError naming a span outside of the text, or two that share a
    word."""
    where, places = sentence.where, sentence.places
    tags, widened = ["O"] * len(sentence.words), 0
    for span in spans if isinstance(spans, list) else [spans]:
        start, end, label = (span.get(key) if isinstance(span, dict) else None for key in ("start", "end", "label"))
        inside = []
        if type(start) is int and type(end) is int and 0 <= start < end <= len(sentence.text):
            inside = [i for i, (first, last) in enumerate(places) if first < end and last > start]
        if not inside or not isinstance(label, str) or not label:
            raise ValueError(
                f"{where}: {json.dumps(span, default=repr):.80} is not a span (start, end, label) around a word of its text"
            )
        if any(tags[i] != "O" for i in inside):
            raise ValueError(f"{where}: two spans share the word {sentence.words[inside[0]]!r:.40}; a word has one tag")
        for i in inside:
            tags[i] = ("B-" if i == inside[0] else "I-") + label
        widened += (places[inside[0]][0], places[inside[-1]][1]) != (start, end)
    return tags, widened


# ---- questions


def _questions(task: Task, path: Path, labelled: bool) -> Iterator[QuestionExample]:
    tree = tables.parse_json(str(path), "\n".join(line for _, line in tables.lines(path)))
    for a, article in enumerate(_get(str(path), tree, "data", list)):
        for p, paragraph in enumerate(_get(f"{path}, data[{a}]", article, "paragraphs", list)):
            place = f"{path}, data[{a}].paragraphs[{p}]"
            context = _get(place, paragraph, "context", str)
            for qa in _get(place, paragraph, "qas", list):
                identity = _get(place, qa, "id", str)
                where = f"{place}, question {identity}"
                question = _get(where, qa, "question", str)
                if not (question.strip() and context.strip()):
                    raise ValueError(f"{where}: the question or its context is empty")
                answers = _answers(task, where, context, qa) if labelled else None
                yield QuestionExample(identity, where, question, context, answers)


def _answers(task: Task, where: str, context: str, qa: Any) -> tuple[tuple[str, int], ...]:
    answers = []
    for answer in _get(where, qa, "answers", list):
        text, start = _get(where, answer, "text", str), _get(where, answer, "answer_start", int)
        if start < 0 or context[start : start + len(text)] != text:
            there = context[max(start, 0) : max(start, 0) + len(text)]
            raise ValueError(f"{where}: answer {text!r:.40} is not at {start} of its context, which has {there!r:.40}")
        if not text.strip():
            raise ValueError(f"{where}: an answer is empty")
        answers.append((text, start))
    if bool(answers) == bool(qa.get("is_impossible", False)):  # SQuAD 2.0 has plausible wrong answers in another field
        raise ValueError(f"{where}: has {len(answers)} answers, is_impossible={qa.get('is_impossible', False)}")
    if not (answers or task.unanswerable):
        raise ValueError(f"{where}: has no answer, which {task.name} does not allow; squad2.0 does")
    return tuple(answers)


def _get(where: str, node: Any, key: str, kind: type) -> Any:
    value = node.get(key) if isinstance(node, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "list", str: "text", int: "number"}
        raise ValueError(f"{where}: has no {key!r} that is a {names[kind]}, as SQuAD's JSON has")
    return value

"""Texts of evaluation files: TSV, CSV, JSON, JSON lines, tagged words a line, plain lines; gzip where the name ends in .gz.

Every cell is a text, and every string of a JSON value but answers, which are names and numbers that any document may hold:
the question and the passage tell. Which texts are too short to tell anything is not said here.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput
from megabert.common import tables

TAGGED = (".conll", ".bio", ".iob", ".iob2")
NO_TEXTS = ("answers", "answer", "plausible_answers", "title", "id")  # of SQuAD and what is made like it
TRIED = 200  # lines that tell whether a file holds a tagged word a line

Text = tuple[str, str]  # where it stands, and what


def texts(path: str) -> Iterator[Text]:
    """(file and line, text) of each text of an evaluation file. Raises BadInput where it can't be read."""
    file = Path(path)
    try:
        yield from _texts(file)
    except (ValueError, csv.Error) as error:
        said = str(error)
        raise BadInput(said if said.startswith(path) else f"{path}: {said}") from None


def _texts(path: Path) -> Iterator[Text]:
    ending = tables.ending(path)
    if ending == ".json":
        yield from _json(path)
    elif ending == ".jsonl":
        for number, line in tables.lines(path):
            if line.strip():
                where = f"{path}, line {number}"
                yield from ((where, text) for text in _strings(tables.parse_json(where, line)))
    elif ending == ".csv":
        reader = csv.reader(line + "\n" for _, line in tables.lines(path))
        for row in reader:
            yield from ((f"{path}, line {reader.line_num}", cell) for cell in row)
    elif ending in TAGGED or _is_tagged(path):
        yield from _sentences(path)
    else:
        for number, line in tables.lines(path):
            yield from ((f"{path}, line {number}", cell) for cell in line.split("\t"))


def _json(path: Path) -> Iterator[Text]:
    """A file of one JSON value, or of one a line."""
    text = "\n".join(line for _, line in tables.lines(path))
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield from ((where, found) for found in _strings(tables.parse_json(where, line)))
        return
    yield from ((str(path), found) for found in _strings(tree))


def _strings(tree: Any) -> Iterator[str]:
    """All strings that are values, in order, but those below NO_TEXTS."""
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += reversed([inner for name, inner in value.items() if name not in NO_TEXTS])
        elif isinstance(value, list):
            waiting += reversed(value)


def _is_tagged(path: Path) -> bool:
    """Whether lines are a word and its tags, with a blank line between sentences."""
    lines = [line.strip() for _, line in islice(tables.lines(path), TRIED)]
    full = [line for line in lines if line]
    return (
        len(full) < len(lines) and bool(full) and all(1 < len(line.split()) == len(line.split("\t")) for line in full)
    )


def _sentences(path: Path) -> Iterator[Text]:
    """The first columns between blank lines, joined."""
    words: list[str] = []
    began = 1
    for number, line in tables.lines(path):
        if parts := line.split():
            began = began if words else number
            words.append(parts[0])
        elif words:
            yield f"{path}, line {began}", " ".join(words)
            words = []
    if words:
        yield f"{path}, line {began}", " ".join(words)

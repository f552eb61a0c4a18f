"""Standard input as an input: kept in a file beside the output, because a build reads what it reads more than once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from data_prep.common.errors import BadInput
from data_prep.common.records import Corpus
from megabert.common.atomic_io import appearing_file
from megabert.common.logs import log

PIPE = "-"
CHUNK = 1 << 20


def spool_of(folder: str) -> Path:
    """The file that what comes through a pipe is kept in while a dataset is built of it in `folder`."""
    return Path(f"{folder.rstrip('/')}.stdin")


def spooled(corpora: Sequence[Corpus], folder: str, stdin: BinaryIO) -> list[Corpus]:
    """The corpora with a file in the place of standard input.

    Raises BadInput where it is named twice, or there is such a file of a build that was stopped.
    """
    count = sum(corpus.paths.count(PIPE) for corpus in corpora)
    if not count:
        return list(corpora)
    if count > 1:
        raise BadInput(f"--input {PIPE}: standard input can be read once, and is named {count} times")
    path = spool_of(folder)
    if path.exists():
        raise BadInput(f"{path}: is there already; go on with --input {path}, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing_file(path) as file:
        shutil.copyfileobj(stdin, file, CHUNK)
    log.info(f"standard input is in {path}; a build that was stopped goes on with --input {path}")
    return [
        replace(corpus, paths=tuple(str(path) if item == PIPE else item for item in corpus.paths)) for corpus in corpora
    ]

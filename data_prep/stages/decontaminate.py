"""Evaluation texts as an index that every reader of documents looks overlaps up in, and the list of what they dropped."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.common import hashing
from data_prep.common.errors import BadInput
from data_prep.executor import output_folder, work_files
from data_prep.executor.work_files import Done, Job
from data_prep.filters import overlap
from data_prep.filters.overlap import Evaluation
from data_prep.filters.quality import WordFacts
from data_prep.readers import evaluation
from data_prep.tokens.encoder import word_facts

REASON = "evaluation text"  # why a document was dropped
STEM = "evaluation"
SHOWN = 300  # characters of a text in the list


@dataclass(frozen=True)
class EvaluationFile:
    """A file of evaluation texts as it is; `index` is its place among them."""

    index: int
    path: str
    sha256: str


def files(paths: tuple[str, ...]) -> list[EvaluationFile]:
    """Raises BadInput for a file that can't be read."""
    digests = [hashing.of_file(path, "--decontaminate") for path in paths]
    return [
        EvaluationFile(index, path, sha256) for index, (path, sha256) in enumerate(zip(paths, digests, strict=True))
    ]


def index(job: Job, listed: tuple[EvaluationFile, ...]) -> Done:
    """Write evaluation.{stretches,sentences,texts}: the index of all texts, and each text with its place on a line."""
    done = Done()
    found = [text for file in listed for text in evaluation.texts(file.path)]
    words = word_facts([text.split("\n") for _, text in found], job.options.normalization, folded=True)
    stretches, sentences = overlap.index(words)
    if not len(stretches) + len(sentences):
        raise BadInput(f"--decontaminate {listed[0].path}: holds no text of {overlap.MIN_WORDS} words or more")
    lines = "".join(json.dumps([where, text[:SHOWN]]) + "\n" for where, text in found)
    work_files.write(job, f"{STEM}.stretches", stretches, done)
    work_files.write(job, f"{STEM}.sentences", sentences, done)
    work_files.write(job, f"{STEM}.texts", np.frombuffer(lines.encode(), np.uint8), done)
    done.facts["texts"] = len(np.union1d(stretches["text"], sentences["text"]))
    return done


def collect(job: Job, tasks: int) -> Done:
    """Write contaminated.jsonl: what every task dropped."""
    done = Done()
    with work_files.Writer(job, output_folder.CONTAMINATED, done) as file:
        for task in range(tasks):
            file.write(work_files.read(job, f"read-{task:07d}.contaminated", "uint8"))
    return done


# What a process has opened is read and not mapped: it stays to the end of the process, and NFS removes no folder with an open
# file in it.


@functools.lru_cache(maxsize=1)
def _opened(work: str, identity: tuple[int, int]) -> Evaluation:
    return Evaluation(
        np.fromfile(Path(work, f"{STEM}.stretches"), overlap.STRETCH),
        np.fromfile(Path(work, f"{STEM}.sentences"), overlap.SENTENCE),
    )


@functools.lru_cache(maxsize=1)
def _lines(path: str, identity: tuple[int, int]) -> np.ndarray:
    """int64 [n + 1]: the byte that each line of a file begins at, and its end."""
    with open(path, "rb") as file:
        return np.cumsum([0, *map(len, file)])


def _identity(job: Job) -> tuple[int, int]:
    status = os.stat(job.path(f"{STEM}.texts"))
    return status.st_ino, status.st_mtime_ns


def find(job: Job, words: WordFacts) -> list[overlap.Match]:
    """Documents that overlap with an evaluation text."""
    return _opened(job.work, _identity(job)).find(words)


def listed(job: Job, match: overlap.Match, document: str) -> str:
    """A line of the list of dropped documents: its opening, and the evaluation text it overlaps with, as JSON."""
    begin, end = _lines(job.path(f"{STEM}.texts"), _identity(job))[match.text : match.text + 2].tolist()
    where, text = json.loads(work_files.read(job, f"{STEM}.texts", "uint8", begin, end - begin).tobytes())
    return json.dumps({"document": document[:SHOWN], "evaluation": where, "text": text}, ensure_ascii=False) + "\n"

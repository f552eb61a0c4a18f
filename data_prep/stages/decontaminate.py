"""Evaluation texts as an index that every reader of documents looks overlaps up in, and the list of what they dropped."""

from __future__ import annotations

import functools
import json
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
        EvaluationFile(index, path, sha256)
        for index, (path, sha256) in enumerate(zip(paths, digests, strict=True))
    ]


def index(job: Job, listed: tuple[EvaluationFile, ...]) -> Done:
    """Write evaluation.{stretches,sentences,texts}: the index of all texts, and each text with its place on a line."""
    done = Done()
    found = [text for file in listed for text in evaluation.texts(file.path)]
    words = word_facts([text.split("\n") for _, text in found], job.options.normalization, folded=True)
    stretches, sentences = overlap.index(words)
    if not len(stretches) + len(sentences):
        raise BadInput(
            f"--decontaminate {listed[0].path}: holds no text of {overlap.MIN_WORDS} words or more"
        )
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


@functools.lru_cache(maxsize=1)
def _opened(work: str, identity: tuple[int, int]) -> Evaluation:
    job_path = Path(work)
    tables = []
    for name, dtype in (("stretches", overlap.STRETCH), ("sentences", overlap.SENTENCE)):
        path = job_path / f"{STEM}.{name}"
        tables.append(np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype))
    return Evaluation(*tables)


def find(job: Job, words: WordFacts) -> list[overlap.Match]:
    """Documents that overlap with an evaluation text."""
    status = Path(job.path(f"{STEM}.texts")).stat()
    return _opened(job.work, (status.st_ino, status.st_mtime_ns)).find(words)


def listed(job: Job, match: overlap.Match, document: str) -> str:
    """A line of the list of dropped documents: its opening, and the evaluation text it overlaps with, as JSON."""
    with open(job.path(f"{STEM}.texts"), encoding="utf-8") as file:
        where, text = json.loads(next(line for i, line in enumerate(file) if i == match.text))
    return (
        json.dumps({"document": document[:SHOWN], "evaluation": where, "text": text}, ensure_ascii=False)
        + "\n"
    )

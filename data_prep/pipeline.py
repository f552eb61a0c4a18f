"""The stages of a build in order, from listed files to written shards without manifests.

A stage is a map over items of work, such as tasks of reading or shards, that depend only on the stages before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from data_prep.common.errors import UNREADABLE
from data_prep.common.records import UNPACK, RangeList, ReadTask
from data_prep.executor import output_folder
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import BuildJob, ItemResult, TooLittleText, total
from data_prep.readers.tasks import group
from data_prep.stages import dedup, passages, read, sequences, shuffle, texts, train_tokenizer, unpack, write
from data_prep.stages.write import WrittenSplit
from megabert.data.tokenizer import Tokenizer


def prepare(
    stages: Stages, job: BuildJob, ranges: list[RangeList], given: Tokenizer | None
) -> tuple[BuildJob, list[ReadTask]]:
    """The stages before reading. Returns the job with its tokenizer, and the tasks of reading."""
    tasks = group(unpack.run(stages, job, ranges))
    if not tasks:
        raise TooLittleText("--input: no text is left of the files that were unpacked")
    tokenizer = train_tokenizer.run(stages, job, tasks, given)
    return replace(job, tokenizer=str(tokenizer.path), tokenizer_sha256=tokenizer.sha256), tasks


def run(stages: Stages, job: BuildJob, tasks: list[ReadTask]) -> tuple[list[ItemResult], dict[int, list[WrittenSplit]]]:
    """The stages from reading to shards, which are in their final folders afterwards.

    Returns the results of reading, and for each row length the held-out part, if any, and then the training part of its dataset.
    """
    documents = read.run(stages, job, tasks)
    # a resume reads tasks with unreadable files again, which may have unpacked text, too
    if UNREADABLE not in total(documents).problems:
        stages.consume(UNPACK)
    kept = dedup.run(stages, job, tasks, documents)
    if job.options.save_text:
        texts.run(stages, job, kept)
    job, kept = passages.run(stages, job, kept, documents)
    unknown = read.unknown(total(documents))
    datasets: dict[int, list[WrittenSplit]] = {}
    for seq_len, folder in output_folder.folders(Path(job.output), job.options.seq_len).items():
        splits = sequences.run(stages, job, kept, seq_len, folder)
        if seq_len == job.options.seq_len[-1]:
            stages.consume(read.STAGE, *dedup.STAGES)
        written: list[WrittenSplit] = []
        datasets[seq_len] = written
        for split, drawn in splits:
            packed = shuffle.run(stages, job, split, drawn.counts["tokens"])
            written.append(write.run(stages, job, split, drawn, packed, unknown, held=next(iter(written), None)))
    return documents, datasets

"""The stages of a build in order, from listed files to written shards without manifests.

    unpack           large packed files → spools of text, if there are any               a file
    train_tokenizer  a sample spread over the corpora → a tokenizer, unless one is given
    read             documents → clean → judge → tokens, once for all row lengths        a task: some MB of text
    dedup            hashes of all documents, sorted a task, compared by key ranges      a range of keys
    texts            the remaining documents as Parquet, with --save-text                a task
    passages         held-out passages, if documents are few                             a task
    sequences        sequences of one length, ordered by a random 64-bit key             a task
    shuffle          a key range of all tasks: packed into rows, rows shuffled           about a shard
    write            shards                                                              a shard

A stage is a map over items of work (right column) that depend only on the stages before.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.common.records import RangeList, ReadTask
from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Stage, Stages
from data_prep.executor.work_files import BuildJob, total
from data_prep.readers.tasks import group
from data_prep.report import summary
from data_prep.stages import dedup, passages, read, sequences, shuffle, texts, train_tokenizer, unpack, write
from data_prep.stages.sequences import DrawnSequences, KeptDocuments
from data_prep.stages.texts import SavedTask
from megabert.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class WrittenDataset:
    """Written shards of one row length: (folder, manifest) of the held-out part, if any, then of the training part."""

    seq_len: int
    folder: Path
    manifests: list[tuple[Path, dict[str, Any]]]
    figures: dict[str, Any]


@dataclass(frozen=True)
class BuildOutput:
    """Results of all stages. `documents`: the stage that read the input."""

    tokenizer: Tokenizer
    tasks: list[ReadTask]
    documents: Stage
    datasets: list[WrittenDataset]


@dataclass(frozen=True)
class ReadPlan:
    """Inputs of reading; `unpacked`: the stage that unpacked large files, if there are any."""

    job: BuildJob
    tokenizer: Tokenizer
    tasks: list[ReadTask]
    unpacked: Stage | None


def plan_reading(stages: Stages, job: BuildJob, ranges: list[RangeList], given: Tokenizer | None) -> ReadPlan:
    """The stages before reading: unpack large files, group the input into tasks, train a tokenizer."""
    unpacked = None
    if packed := unpack.packed_files(ranges):
        size = sum(item.file.size for item in packed)
        unpacked = stages.map(
            output_folder.UNPACK, unpack.unpack, unpack.without_options(job), packed, unit="B", size=size
        )
        ranges = unpack.cut(job, ranges, packed, unpacked.results)
    output_folder.remove_others(Path(job.work), output_folder.SPOOLS, unpacked.results if unpacked else [])
    tasks = group(ranges)
    tokenizer = train_tokenizer.run(stages, job, tasks, given)
    job = replace(job, tokenizer=str(tokenizer.path), tokenizer_sha256=tokenizer.sha256)
    return ReadPlan(job, tokenizer, tasks, unpacked)


def run_stages(stages: Stages, plan: ReadPlan, folder: Path, trained: bool) -> BuildOutput:
    """Run the stages from reading to shards, which are in their final folders afterwards, without manifests."""
    job, tasks = plan.job, plan.tasks
    size = sum(task.size for task in tasks)
    documents = stages.map("read", read.read_task, job, tasks, unit="B", size=size)
    read.warn_of_large_documents(job, documents.results)
    if plan.unpacked:
        stages.journal.consume(plan.unpacked, documents)
    unknown = summary.unknown(total(documents.results))

    compared, mask = dedup.run(stages, job, documents)
    readers = [*compared]  # stages that read the files of `documents` or `compared`
    kept = [
        KeptDocuments(task.index, tuple(result.facts["units"]), task.corpus, mask)
        for task, result in zip(tasks, documents.results, strict=True)
    ]
    if job.options.save_text:
        sources = (tuple(result.facts.get("sources", ())) for result in documents.results)
        saved = [SavedTask(part.task, mask, files, str(folder)) for part, files in zip(kept, sources, strict=True)]
        readers.append(texts.run(stages, job, saved, folder))
    held_tokens = [result.counts["held-out tokens"] for result in documents.results]
    if passages.are_needed(job, documents):
        job, held_tokens, cut = passages.run(stages, job, kept, documents)
        readers.append(cut)

    datasets = []
    for seq_len, place in output_folder.folders(folder, job.options.seq_len).items():
        drawn = sequences.run(stages, job, kept, held_tokens, seq_len)
        readers.append(drawn.stage)
        if seq_len == job.options.seq_len[-1]:
            for stage in (documents, *compared):
                stages.journal.consume(stage, *readers)
        datasets.append(_dataset(stages, job, drawn, plan.tokenizer, place, job.options.listed(trained), unknown))
    return BuildOutput(plan.tokenizer, tasks, documents, datasets)


def _dataset(
    stages: Stages,
    job: BuildJob,
    drawn: DrawnSequences,
    tokenizer: Tokenizer,
    folder: Path,
    listed: dict[str, Any],
    unknown: dict[str, Any],
) -> WrittenDataset:
    """Shuffle and write the held-out rows, if any, then the training rows. `listed`: options as in manifests; `unknown`: as of
    `summary.unknown`."""
    seq_len = drawn.seq_len
    held, train = total(drawn.held), total(drawn.train)
    slots = shuffle.choose_slots(train.histograms["tokens of a sequence"], seq_len)
    dtype, name = work_files.id_dtype(tokenizer).name, tokenizer.path.name
    held_folder, held_entry, manifests = folder / output_folder.HELD_OUT, None, []
    if held.counts["sequences"]:
        split = shuffle.RowSplit("heldout", seq_len, slots, len(drawn.held), dtype, str(held_folder))
        made = write.run(stages, job, *shuffle.run(stages, job, held.counts["tokens"], split, None))
        manifest = write.manifest(split, made, held, tokenizer, f"../{name}", listed, None)
        manifests.append((held_folder, manifest))
        held_entry = {"path": output_folder.HELD_OUT, "rows": manifest["rows"]}
        if job.passage:
            held_entry |= {"passages": held.counts["passages"], "passage_tokens": job.passage}
    elif held_folder.exists():
        shutil.rmtree(held_folder)  # of the input before a resume
    split = shuffle.RowSplit("train", seq_len, slots, len(drawn.train), dtype, str(folder))
    made = write.run(stages, job, *shuffle.run(stages, job, train.counts["tokens"], split, drawn.stage))
    manifest = write.manifest(split, made, train, tokenizer, name, listed, held_entry)
    manifests.append((folder, manifest))
    for _, written in manifests:
        written["statistics"] |= {f"unknown_{name}": unknown[name] for name in ("token_share", "character_share")}
    return WrittenDataset(seq_len, folder, manifests, summary.dataset_facts(manifest, train, held))

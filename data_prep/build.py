"""The build: from inputs to committed datasets, or a part of its reading.

Datasets are complete or absent: work files are beside them, and a manifest is the last file written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.common import errors
from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import Corpus, RangeList, source_names
from data_prep.executor import output_folder, remote_output, work_files
from data_prep.executor.journal import Journal, Stages, write_json
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob, ItemResult, TooLittleText
from data_prep.options import BuildOptions
from data_prep.pipeline import BuildOutput, plan_reading, run_stages
from data_prep.readers.boundaries import KINDS
from data_prep.readers.tasks import list_ranges, text_documents
from data_prep.report import summary
from data_prep.stages import read, train_tokenizer
from megabert.common.logs import log
from megabert.data import shards
from megabert.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class BuildPlan:
    """Inputs and output of a build. `given`: the tokenizer, None to train one; `on_error`: stop | skip; `url`: where the content of
    the folder goes."""

    corpora: Sequence[Corpus]
    folder: Path
    options: BuildOptions
    given: Tokenizer | None = None
    on_error: str = "stop"
    url: str = ""


def build(plan: BuildPlan, executor: Pool, overwrite: bool = False, progress: bool = True) -> dict[str, Any] | None:
    """Build a dataset for each row length and return a summary; None if it is complete already. Rank 0 only.

    The bytes depend only on the inputs, the options and the tokenizer file. Finished work of parts (`build_part`) is used like
    that of a killed build. Raises BadInput for mistakes of the user, ValueError for a bad tokenizer file, OSError when the disk is
    full.
    """
    began = time.perf_counter()
    problems = Problems(plan.on_error)
    ranges = _listed(plan, problems)
    account = describe_input(plan, ranges)
    if plan.url and remote_output.is_done(plan.url, account, plan.options.seq_len, overwrite):
        return None
    opened = output_folder.opened(plan.folder, account, plan.options.seq_len, overwrite, _sources(plan, ranges))
    with opened as work:
        if work is None:
            if plan.url:  # killed while the last files were uploaded
                remote_output.publish(plan.url, plan.folder, progress)
            return None
        with contextlib.closing(Journal(work, executor)) as journal:
            resumed = journal.holds_something()
            stages = Stages(journal, progress)
            with _with_reasons(problems, stages):
                reading = plan_reading(stages, _job(plan, work, ranges), ranges, plan.given)
                del ranges  # the tasks have them
                output = run_stages(stages, reading, plan.folder, plan.given is None)
            journal.flush()
            finished = time.perf_counter()
            read_of = summary.by_corpus(plan.corpora, output.tasks, output.documents.results)
            summary.warn_unknown(read_of)
            facts = summary.facts(
                account,
                plan.corpora,
                output.tokenizer,
                read_of,
                stages.everything,
                problems,
                {str(dataset.seq_len): dataset.figures for dataset in output.datasets},
            )
            _commit(plan.folder, output, facts, account)
    if plan.url:
        remote_output.publish(plan.url, plan.folder, progress)
    training = (train_tokenizer.SAMPLE, train_tokenizer.TRAIN)
    tokenizer_seconds = sum(stages.figures[name]["seconds"] for name in training if name in stages.figures)
    seconds = finished - began - tokenizer_seconds
    # a resumed build was partly done before this time
    speed = None if resumed else facts["read"]["bytes"] / 1e6 / seconds
    return facts | {
        "seconds": seconds,
        "tokenizer_seconds": tokenizer_seconds,
        "workers": executor.size,
        "resumed": resumed,
        "mb_per_second": speed,
        "stages": stages.figures,
        "peak_memory": max(stages.everything.peak, work_files.peak_memory()),
    }


def build_part(plan: BuildPlan, executor: Pool, part: tuple[int, int], progress: bool = True) -> bool:
    """Read part (k, n) of the input of a build, k from 1 to n; False if the dataset is complete already.

    Parts are independent and may run at the same time, on machines with a shared folder. The first one unpacks large files and trains
    the tokenizer while the others wait. `build` does the rest.
    """
    problems = Problems(plan.on_error)
    ranges = _listed(plan, problems)
    joined = output_folder.joined(
        plan.folder, describe_input(plan, ranges), plan.options.seq_len, _sources(plan, ranges)
    )
    with joined as work:
        if work is None:
            return False
        with contextlib.closing(Journal(work, executor)) as journal:
            stages = Stages(journal, progress)
            with output_folder.alone(work), _with_reasons(problems, stages):
                reading = plan_reading(stages, _job(plan, work, ranges), ranges, plan.given)
                if reading.unpacked:
                    journal.keep(reading.unpacked)
                journal.flush()
            stages.map_part("read", read.read_task, reading.job, reading.tasks, part)
    return True


@contextlib.contextmanager
def _with_reasons(problems: Problems, stages: Stages) -> Iterator[None]:
    """Adds to the error of too little text what was read, and dropped for which reasons; `problems`: those of the list of files."""
    try:
        yield
    except TooLittleText as error:
        listed = ItemResult(problems=problems.counts, lost=problems.lost)
        read = work_files.total([listed, stages.everything, error.read or ItemResult()])
        raise BadInput(f"{error}{summary.losses_text(read)}") from None


def _listed(plan: BuildPlan, problems: Problems) -> list[RangeList]:
    """The ranges of each corpus. Raises BadInput for a bad model or function of a filter, and if there is no file."""
    for user_filter in plan.options.own_filters:
        user_filter.check()
    ranges = list_ranges(plan.corpora, plan.options.read, problems)
    if not any(map(len, ranges)):
        paths = " ".join(path for corpus in plan.corpora for path in corpus.paths)
        found = errors.describe_losses(problems.counts, problems.lost)
        raise BadInput(f"--input {paths}: no text there ({'no files' if found == 'none' else found})")
    return ranges


def _sources(plan: BuildPlan, ranges: list[RangeList]) -> Iterator[str]:
    """Every file that a build reads."""
    named = [user_filter.path for user_filter in plan.options.own_filters]
    if plan.given is not None:
        named.append(str(plan.given.path))
    yield from named
    yield from map(os.path.realpath, named)
    for part in chain.from_iterable(ranges):
        yield part.path


def _job(plan: BuildPlan, work: Path, ranges: list[RangeList]) -> BuildJob:
    folders = text_documents(plan.corpora, ranges, plan.options.read)
    for folder, kind in folders:
        log.info(
            f"{folder}: a document of plain text is {KINDS[kind]}, by its first bytes; --text-documents decides otherwise"
        )
    return BuildJob(
        plan.options,
        tokenizer="",
        work=str(work),
        on_error=plan.on_error,
        held_limit=int(plan.options.held_out * (1 << 64)),
        weights=tuple(corpus.weight for corpus in plan.corpora),
        sources=source_names(plan.corpora),
        folders=folders,
        upload=(str(plan.folder), plan.url),
    )


def describe_input(plan: BuildPlan, ranges: list[RangeList]) -> dict[str, Any]:
    """The account that identifies a build: options, corpora, tokenizer, and a digest of the files with their sizes and times."""
    digest = hashlib.blake2b(digest_size=16)
    count, last = 0, ""
    for part in chain.from_iterable(ranges):
        digest.update(repr(part).encode())
        count += part.path != last  # ranges of a file are consecutive
        last = part.path
    return {
        "options": plan.options.listed(plan.given is None),
        "corpora": {c.name: {"paths": list(c.paths), "weight": c.weight} for c in plan.corpora},
        "tokenizer_sha256": None if plan.given is None else plan.given.sha256,
        output_folder.FILES: {
            "count": count,
            "bytes": sum(of_corpus.size for of_corpus in ranges),
            "digest": digest.hexdigest(),
        },
    }


def _commit(folder: Path, output: BuildOutput, facts: dict[str, Any], account: dict[str, Any]) -> None:
    """Write everything but the manifests, then those of held-out parts, then the others."""
    for dataset in output.datasets:
        for name, data in output.tokenizer.files().items():
            (dataset.folder / name).write_bytes(data)
    write_json(folder / output_folder.REPORT, facts)
    write_json(folder / output_folder.ACCOUNT, account)
    for place, manifest in (entry for dataset in output.datasets for entry in dataset.manifests):
        if held_out := manifest["held_out"]:
            written = (place / output_folder.HELD_OUT / shards.MANIFEST).read_bytes()
            held_out["manifest_sha256"] = hashlib.sha256(written).hexdigest()
        shards.write_manifest(place, manifest)

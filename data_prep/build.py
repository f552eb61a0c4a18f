"""The build: from inputs to committed datasets, or a part of its reading.

Datasets are complete or absent: work files are beside them, and a manifest is the last file written.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep import pipeline
from data_prep.common import utf8
from data_prep.common.errors import EMPTY, BadInput, Problems, describe_losses
from data_prep.common.records import UNPACK, Corpus, RangeList, source_names
from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Stages, write_json
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob, ItemResult, TooLittleText
from data_prep.filters import classifiers, functions
from data_prep.options import BuildOptions
from data_prep.readers import detection
from data_prep.readers.boundaries import describe_guess, text_documents
from data_prep.readers.documents import ABOUT_MEMBER, HIDDEN_MEMBER, NO_DOCUMENT
from data_prep.readers.tasks import list_ranges
from data_prep.report import summary
from data_prep.stages import read, train_tokenizer
from data_prep.stages.write import WrittenSplit
from megabert.common import storage
from megabert.common.files import write_atomically
from megabert.common.logs import log
from megabert.data import shards
from megabert.data.tokenizer import Tokenizer

# reasons of problems under both policies
COUNTED_ALWAYS = {EMPTY, ABOUT_MEMBER, HIDDEN_MEMBER, NO_DOCUMENT, detection.INDEX, utf8.REPLACED}


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

    The bytes depend only on inputs, options and tokenizer file. Work of parts (`build_part`) is used like that of a
    killed build. Raises BadInput for mistakes of the user, ValueError for a bad tokenizer, OSError for a full disk.
    """
    began = time.perf_counter()
    problems = Problems(plan.on_error)
    ranges = _list_input(plan, problems)
    account = describe_input(plan, ranges)
    if plan.url and not output_folder.prepare_url(plan.url, account, overwrite, plan.on_error, _sources(plan, ranges)):
        output_folder.remove_uploaded(plan.folder)  # of a build that was killed while it removed this
        return None
    with output_folder.opened(
        plan.folder, account, overwrite, _sources(plan, ranges), on_error=plan.on_error, url=plan.url
    ) as work:
        if work is None:
            if plan.url:  # killed while the last files were uploaded
                output_folder.upload(plan.url, plan.folder, progress)
            return None
        with Stages(work, executor, progress) as stages:
            with _with_reasons(problems, stages):
                job, tasks = pipeline.prepare(stages, _job(plan, work, ranges), ranges, plan.given)
                del ranges  # the tasks have them
                documents, datasets = pipeline.run(stages, job, tasks)
            stages.flush()
        finished = time.perf_counter()
        tokenizer = work_files.job_tokenizer(job)
        facts = summary.facts(
            account=account,
            tokenizer=tokenizer,
            corpora=summary.describe_corpora(plan.corpora, tasks, documents),
            everything=stages.everything,
            problems=problems,
            datasets=datasets,
        )
        facts["lacks_bad_input"] = plan.on_error == "skip" and bool(facts["problems"].keys() - COUNTED_ALWAYS)
        _commit(plan.folder, datasets, tokenizer, facts, account)
    if plan.url:
        output_folder.publish(plan.url, plan.folder, progress)
    training = (train_tokenizer.SAMPLE, train_tokenizer.TRAIN)
    tokenizer_seconds = sum(stages.figures[name]["seconds"] for name in training if name in stages.figures)
    seconds = finished - began - tokenizer_seconds
    return facts | {
        "seconds": seconds,
        "tokenizer_seconds": tokenizer_seconds,
        "workers": executor.size,
        "resumed": stages.resumed,
        # a resumed build was partly done before this time
        "mb_per_second": None if stages.resumed else facts["read"]["bytes"] / 1e6 / seconds,
        "stages": stages.figures,
        "peak_memory": max(stages.everything.peak, work_files.peak_memory()),
    }


def build_part(plan: BuildPlan, executor: Pool, part: tuple[int, int], progress: bool = True) -> bool:
    """Read part (k, n) of the input of a build, k from 1 to n; False if the dataset is complete already.

    Parts are independent and may run at the same time, on machines with a shared folder. The first one unpacks large files and trains
    the tokenizer while the others wait. `build` does the rest.
    """
    problems = Problems(plan.on_error)
    ranges = _list_input(plan, problems)
    account, sources = describe_input(plan, ranges), _sources(plan, ranges)
    with output_folder.opened(plan.folder, account, sources=sources, part=True, on_error=plan.on_error) as work:
        if work is None:
            return False
        with Stages(work, executor, progress) as stages:
            with output_folder.alone(work), _with_reasons(problems, stages):
                job, tasks = pipeline.prepare(stages, _job(plan, work, ranges), ranges, plan.given)
                stages.keep(UNPACK)
                stages.flush()
            stages.map_part(read.STAGE, read.read_task, job, tasks, part)
    return True


@contextlib.contextmanager
def _with_reasons(problems: Problems, stages: Stages) -> Iterator[None]:
    """Adds to the error of too little text what was read, and dropped for which reasons; `problems`: those of the list of files."""
    try:
        yield
    except TooLittleText as error:
        read = work_files.total([ItemResult.of(problems), stages.everything, error.read or ItemResult()])
        raise BadInput(f"{error}{summary.losses_text(read)}") from None


def _list_input(plan: BuildPlan, problems: Problems) -> list[RangeList]:
    """The ranges of each corpus. Raises BadInput for a bad model or function of a filter, and if there is no file."""
    functions.forget()
    classifiers.forget()
    for user_filter in plan.options.custom_filters:
        user_filter.check()
    ranges = list_ranges(plan.corpora, plan.options.read, problems, [plan.folder, *filter(None, [plan.url])])
    if not any(map(len, ranges)):
        paths = " ".join(path for corpus in plan.corpora for path in corpus.paths)
        found = describe_losses(problems.counts, problems.lost)
        raise BadInput(f"--input {paths}: no text there ({'no files' if found == 'none' else found})")
    for corpus, its_ranges in zip(plan.corpora, ranges, strict=True):
        if not its_ranges:
            raise BadInput(
                f"--input {corpus.name}=…: no text that an earlier corpus lacks; name it first, or leave it out"
            )
    return ranges


def describe_input(plan: BuildPlan, ranges: list[RangeList]) -> dict[str, Any]:
    """The account that identifies a build: options, corpora, tokenizer, and a digest of the files with their sizes and times."""
    digest = hashlib.blake2b(digest_size=16)
    count, last = 0, ""
    for part in chain.from_iterable(ranges):
        digest.update(repr(part).encode())
        count += part.path != last  # ranges of a file are consecutive
        last = part.path
    size = sum(of_corpus.size for of_corpus in ranges)
    return {
        "options": plan.options.listed(plan.given is None),
        "corpora": {c.name: {"paths": list(map(storage.public, c.paths)), "weight": c.weight} for c in plan.corpora},
        "tokenizer_sha256": None if plan.given is None else plan.given.sha256,
        output_folder.FILES: {"count": count, "bytes": size, "digest": digest.hexdigest()},
    }


def _sources(plan: BuildPlan, ranges: list[RangeList]) -> Iterator[str]:
    """Every file that a build reads."""
    named = [user_filter.path for user_filter in plan.options.custom_filters]
    if plan.given is not None:
        named.append(str(plan.given.path))
    return chain(named, (part.path for part in chain.from_iterable(ranges)))


def _job(plan: BuildPlan, work: Path, ranges: list[RangeList]) -> BuildJob:
    folders = text_documents(plan.corpora, ranges, plan.options.read)
    for folder, kind in folders:
        log.info(describe_guess(folder, kind))
    return BuildJob(
        plan.options,
        tokenizer="",
        work=str(work),
        on_error=plan.on_error,
        held_limit=int(plan.options.held_out * (1 << 64)),
        weights=tuple(corpus.weight for corpus in plan.corpora),
        sources=source_names(plan.corpora),
        folders=folders,
        output=str(plan.folder),
        url=plan.url,
    )


def _commit(
    output: Path,
    datasets: dict[int, list[WrittenSplit]],
    tokenizer: Tokenizer,
    facts: dict[str, Any],
    account: dict[str, Any],
) -> None:
    """Write everything but the manifests, then those of held-out parts, then the others."""
    for folder in output_folder.folders(output, tuple(datasets)).values():
        for name, data in tokenizer.files().items():
            write_atomically(folder / name, data)
    write_json(output / output_folder.REPORT, facts)
    write_json(output / output_folder.ACCOUNT, account)
    for folder, manifest, _ in chain.from_iterable(datasets.values()):
        if held_out := manifest["held_out"]:
            written = (folder / output_folder.HELD_OUT / shards.MANIFEST).read_bytes()
            held_out["manifest_sha256"] = hashlib.sha256(written).hexdigest()
        shards.write_manifest(folder, manifest | {"options": account["options"]})

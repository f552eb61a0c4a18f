"""The build: from inputs to committed datasets, or a part of its reading.

It makes complete datasets or none: all work happens beside them, and a manifest is the last file written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput, Problems, Unfinished
from data_prep.common.records import TABLES, Corpus, FileRange
from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Journal, Stages, write_json
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob, ItemResult
from data_prep.options import BuildOptions
from data_prep.pipeline import BuildOutput, ReadPlan, plan_reading, run_stages
from data_prep.readers.tasks import list_ranges
from data_prep.report import summary
from data_prep.stages import read, train_tokenizer
from megabert.common.files import sha256_of, write_whole
from megabert.common.logs import log
from megabert.data import shards
from megabert.data.tokenizer import Tokenizer

# bytes on disk of a row group or batch of a table, which can't be cut: some 400 MB of text
LARGE_GROUP = 128 << 20
# the file of the work folder that holds the number of parts
PARTS = "parts"


def build(
    corpora: Sequence[Corpus],
    folder: str | os.PathLike[str],
    options: BuildOptions,
    executor: Pool,
    given: Tokenizer | None = None,
    overwrite: bool = False,
    on_error: str = "stop",
    progress: bool = True,
    allow: bool = False,
    parts_read: bool = False,
    recipe: str = "",
    recipe_file: str | None = None,
) -> dict[str, Any] | None:
    """Build a dataset a row length in `folder` and return a summary; None when it is complete already. Rank 0 alone.

    `recipe` is stored with it, whether or not it was
    read from `recipe_file`. Without `allow` it stops before rows are written where most pairs would be random or many tokens
    be cut off.

    The bytes depend on the inputs and `options` (and the tokenizer file) alone. With `parts_read` the parts of `build_part`
    must be there. Raises BadInput for what the user must change, ValueError for a bad tokenizer file, OSError when the disk
    is full.
    """
    began = time.perf_counter()
    problems = Problems(on_error)
    ranges = _listed(corpora, options, problems)
    account = account_of(corpora, ranges, options, given)
    sources = _sources(ranges, options, given, recipe_file)
    with output_folder.opened(Path(folder), account, options.seq_lens, overwrite, sources) as work:
        if work is None:
            return None
        with contextlib.closing(Journal(work, executor)) as journal:
            resumed = journal.holds_something()
            stages = Stages(journal, progress)
            plan = plan_reading(stages, _job(corpora, options, work, on_error), ranges, given)
            if parts_read:
                _check_parts(journal, plan)
            output = run_stages(stages, plan, Path(folder), given is None, allow)
            journal.flush()
            finished = time.perf_counter()
            facts = summary.facts(
                account,
                corpora,
                output.tokenizer,
                summary.by_corpus(corpora, output.tasks, output.documents.results),
                stages.everything,
                problems,
                {str(dataset.seq_len): dataset.figures for dataset in output.datasets},
            )
            _commit(Path(folder), output, facts, account, recipe)
    training = (train_tokenizer.SAMPLE, train_tokenizer.TRAIN)
    tokenizer_seconds = sum(stages.figures[name]["seconds"] for name in training if name in stages.figures)
    seconds = finished - began - tokenizer_seconds
    megabytes = facts["read"]["bytes"] / 1e6
    return facts | {
        "seconds": seconds,
        "tokenizer_seconds": tokenizer_seconds,
        "workers": executor.size,
        "resumed": resumed,
        # part of the work of a resumed build was done before the clock was started
        "mb_per_second": None if resumed else megabytes / seconds,
        "mb_per_second_per_worker": None if resumed else megabytes / seconds / executor.size,
        "stage_seconds": dict(stages.everything.seconds),
        "stages": stages.figures,
        "peak_memory": max(stages.everything.peak, work_files.peak_memory()),
    }


def build_part(
    corpora: Sequence[Corpus],
    folder: str | os.PathLike[str],
    options: BuildOptions,
    executor: Pool,
    part: tuple[int, int],
    given: Tokenizer | None = None,
    on_error: str = "stop",
    progress: bool = True,
) -> ItemResult | None:
    """Part (k, n) of the reading of a build, k from 1 to n, and what it read; None when the dataset is complete already.

    Parts are independent of each other and may run at the same time, on machines that see the same folder. The first one unpacks
    large files and trains the tokenizer while the others wait. `build` with `parts_read` does the rest.
    """
    ranges = _listed(corpora, options, Problems(on_error))
    account = account_of(corpora, ranges, options, given)
    sources = _sources(ranges, options, given, None)
    with output_folder.joined(Path(folder), account, options.seq_lens, sources) as work:
        if work is None:
            return None
        with contextlib.closing(Journal(work, executor)) as journal:
            stages = Stages(journal, progress)
            with output_folder.alone(work):
                _agree_on_parts(work, part)
                plan = plan_reading(stages, _job(corpora, options, work, on_error), ranges, given)
                if plan.unpacked:
                    journal.keep(plan.unpacked)
                journal.flush()
            return stages.map_part("read", read.read_task, plan.job, plan.tasks, part)


def _agree_on_parts(work: Path, part: tuple[int, int]) -> None:
    path = work / PARTS
    if path.exists() and (number := int(path.read_text())) != part[1]:
        raise BadInput(f"--part {part[0]}/{part[1]}: other parts of this build are of {number}")
    write_whole(path, f"{part[1]}\n".encode())


def _check_parts(journal: Journal, plan: ReadPlan) -> None:
    """Raises Unfinished naming the parts that are not read."""
    missing = journal.missing("read", read.read_task, plan.job, plan.tasks)
    if not missing:
        return
    path, which = Path(plan.job.path(PARTS)), "K/N"
    if path.exists():
        parts = int(path.read_text())
        which = ", ".join(f"{number + 1}/{parts}" for number in sorted({task % parts for task in missing}))
    raise Unfinished(f"--merge: {len(missing)} of {len(plan.tasks)} tasks are not read yet; first start --part {which}")


def _listed(corpora: Sequence[Corpus], options: BuildOptions, problems: Problems) -> list[tuple[int, FileRange]]:
    """The ranges of the input, with their corpus. Raises BadInput for bad options, and where there is no file."""
    options.check()
    for classifier in {options.quality, *(options.of(corpus).language for corpus in corpora)}:
        if classifier:
            classifier.check()
    ranges = list_ranges(corpora, options.read, problems)
    if not ranges:
        paths = " ".join(path for corpus in corpora for path in corpus.paths)
        raise BadInput(f"--input {paths}: no text there (no files, or all of them empty)")
    largest = max((part for _, part in ranges if part.format in TABLES), key=lambda part: part.size, default=None)
    if largest is not None and largest.size > LARGE_GROUP:
        log.warning(
            f"{largest.path}: {largest.size >> 20:,} MiB that can't be cut, which one worker holds in memory; written "
            "as Parquet with a smaller row_group_size (10,000 rows, say) it is shared"
        )
    return ranges


def _sources(
    ranges: list[tuple[int, FileRange]], options: BuildOptions, given: Tokenizer | None, recipe_file: str | None
) -> Iterator[str]:
    """Every file that a build reads."""
    named = [classifier.path for classifier in (options.language, options.quality) if classifier]
    if given is not None:
        named.append(str(given.path))
    if recipe_file is not None:
        named.append(recipe_file)
    yield from named
    yield from map(os.path.realpath, named)
    for _, part in ranges:
        yield part.path


def _job(corpora: Sequence[Corpus], options: BuildOptions, work: Path, on_error: str) -> BuildJob:
    of_corpora = tuple(options.of(corpus) for corpus in corpora)
    return BuildJob(
        options,
        tokenizer="",
        work=str(work),
        on_error=on_error,
        held_limit=int(options.held_out * (1 << 64)),
        weights=tuple(corpus.weight for corpus in corpora),
        corpus_options=of_corpora if any(of_corpus != options.shared() for of_corpus in of_corpora) else (),
    )


def account_of(
    corpora: Sequence[Corpus], ranges: list[tuple[int, FileRange]], options: BuildOptions, given: Tokenizer | None
) -> dict[str, Any]:
    """The account that identifies a build: options, corpora, tokenizer, and a digest of the files with their sizes and times."""
    digest = hashlib.blake2b(digest_size=16)
    for _, part in ranges:
        digest.update(repr(part).encode())
    return {
        "models": {c.path: sha256_of(Path(c.path)) for c in (options.language, options.quality) if c},
        "options": options.listed(given is None),
        "corpora": {
            corpus.name: {"paths": list(corpus.paths), "weight": corpus.weight} | _own_options(corpus)
            for corpus in corpora
        },
        "tokenizer_sha256": None if given is None else given.sha256,
        output_folder.FILES: {
            "count": len({part.path for _, part in ranges}),
            "bytes": sum(part.size for _, part in ranges),
            "digest": digest.hexdigest(),
        },
    }


def _own_options(corpus: Corpus) -> dict[str, Any]:
    """Options that a corpus has of its own, as accounts list them."""
    listed: dict[str, Any] = {} if corpus.read is None else {"read": asdict(corpus.read)}
    if corpus.languages is not None:
        listed["languages"] = list(corpus.languages)
    return listed if corpus.filters is None else listed | {"filters": list(corpus.filters)}


def _commit(folder: Path, output: BuildOutput, facts: dict[str, Any], account: dict[str, Any], recipe: str) -> None:
    """Write everything but the manifests, then these, those of held-out parts first."""
    for dataset in output.datasets:
        for name, data in output.tokenizer.files().items():
            (dataset.folder / name).write_bytes(data)
    write_json(folder / output_folder.REPORT, facts)
    if recipe:
        write_whole(folder / output_folder.RECIPE, recipe.encode())
    write_json(folder / output_folder.ACCOUNT, account)
    for place, manifest in (entry for dataset in output.datasets for entry in dataset.manifests):
        if held_out := manifest["held_out"]:
            written = (place / output_folder.HELD_OUT / shards.MANIFEST).read_bytes()
            held_out["manifest_sha256"] = hashlib.sha256(written).hexdigest()
        shards.write_manifest(place, manifest)

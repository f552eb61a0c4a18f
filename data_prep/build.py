"""The build: from inputs to committed datasets, or a part of its reading.

It makes whole datasets or none: all work happens beside them, and a manifest is the last thing written.
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
from data_prep.common.records import TABLES
from data_prep.executor import inputs, output_folder, work_files
from data_prep.executor.journal import Journal, write_json
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import Done, Job
from data_prep.options import BuildOptions
from data_prep.pipeline import TRAINING_STAGES, Made, Ready, Stages, make_ready, run_stages
from data_prep.readers.tasks import Corpus, Piece, list_pieces
from data_prep.report import summary
from data_prep.stages import read
from megabert.common.files import sha256_of, write_whole
from megabert.common.logs import log
from megabert.data import shards
from megabert.data.tokenizer import Tokenizer

LARGE_GROUP = 128 << 20  # bytes on disk of a part of a table that can't be cut: some 400 MB of text


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
    known: inputs.Known | None = None,
    recipe_file: str | None = None,
) -> dict[str, Any] | None:
    """Build a dataset a row length in `folder` and return a summary; None when it is there already. Rank 0 alone.

    Files that are `known` are left out; None also where that leaves none. `recipe` is stored with it, whether or not it was
    read from `recipe_file`. Stops before rows are written where most pairs would be random or many tokens be cut off, but
    for `allow`.

    The bytes depend on the inputs and `options` (and the tokenizer file) alone. With `parts_read` what `build_part` does
    must be there. Raises BadInput for what the user must change, ValueError for a bad tokenizer file, OSError when the disk
    is full.
    """
    began = time.perf_counter()
    problems = Problems(on_error)
    pieces = _listed(corpora, options, problems, known)
    if not pieces:
        return None
    account = account_of(corpora, pieces, options, given)
    sources = _sources(pieces, options, given, recipe_file)
    with output_folder.opened(Path(folder), account, options.seq_lens, overwrite, sources) as work:
        if work is None:
            return None
        with contextlib.closing(Journal(work, executor)) as journal:
            resumed = journal.holds_something()
            stages = Stages(journal, progress)
            ready = make_ready(stages, _job(corpora, options, work, on_error), pieces, given)
            if parts_read:
                _check_parts(journal, ready)
            made = run_stages(stages, ready, Path(folder), given is None, allow)
            journal.settle()
            finished = time.perf_counter()
            facts = summary.facts(
                account,
                corpora,
                made.tokenizer,
                summary.by_corpus(corpora, made.tasks, made.documents.results),
                stages.everything,
                problems,
                {str(dataset.seq_len): dataset.figures for dataset in made.datasets},
            )
            inputs.write(Path(folder), pieces)
            _commit(Path(folder), made, facts, account, recipe)
    trained_in = sum(stages.figures[name]["seconds"] for name in TRAINING_STAGES if name in stages.figures)
    seconds = finished - began - trained_in
    megabytes = facts["read"]["bytes"] / 1e6
    return facts | {
        "seconds": seconds,
        "tokenizer_seconds": trained_in,
        "workers": executor.size,
        "resumed": resumed,
        # Of a build that went on, part of the work was done before the clock was started.
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
) -> Done | None:
    """Part (k, n) of the reading of a build, k from 1 to n, and what it read; None when the dataset is there already.

    Parts need nothing of each other and may be done at the same time, on machines that see the same folder. The first that
    comes unpacks large files and trains the tokenizer while the others wait. `build` with `parts_read` does the rest.
    """
    pieces = _listed(corpora, options, Problems(on_error))
    account = account_of(corpora, pieces, options, given)
    sources = _sources(pieces, options, given, None)
    with output_folder.joined(Path(folder), account, options.seq_lens, sources) as work:
        if work is None:
            return None
        with contextlib.closing(Journal(work, executor)) as journal:
            stages = Stages(journal, progress)
            with output_folder.alone(work):
                _agree_on_parts(work, part)
                ready = make_ready(stages, _job(corpora, options, work, on_error), pieces, given)
                if ready.unpacked:
                    journal.keep(ready.unpacked)
                journal.settle()
            return stages.do_part("read", read.read_task, ready.job, ready.tasks, part)


PARTS = "parts"  # the file of the work folder that says how many there are


def _agree_on_parts(work: Path, part: tuple[int, int]) -> None:
    path = work / PARTS
    if path.exists() and (number := int(path.read_text())) != part[1]:
        raise BadInput(f"--part {part[0]}/{part[1]}: other parts of this build are of {number}")
    write_whole(path, f"{part[1]}\n".encode())


def _check_parts(journal: Journal, ready: Ready) -> None:
    """Raises Unfinished naming the parts that are not done."""
    missing = journal.missing("read", read.read_task, ready.job, ready.tasks)
    if not missing:
        return
    path, which = Path(ready.job.path(PARTS)), "K/N"
    if path.exists():
        parts = int(path.read_text())
        which = ", ".join(f"{number + 1}/{parts}" for number in sorted({task % parts for task in missing}))
    raise Unfinished(
        f"--merge: {len(missing)} of {len(ready.tasks)} tasks are not read yet; first start --part {which}"
    )


def _listed(
    corpora: Sequence[Corpus], options: BuildOptions, problems: Problems, known: inputs.Known | None = None
) -> list[tuple[int, Piece]]:
    """The files of the input, with their corpus, that are not `known`.

    Raises BadInput for bad options, and where there is no file, but none where all may be known.
    """
    options.check()
    for classifier in {options.quality, *(options.of(corpus).language for corpus in corpora)}:
        if classifier:
            classifier.check()
    pieces = list_pieces(corpora, options.read, problems, known or (lambda path: False))
    if not pieces and known is None:
        paths = " ".join(path for corpus in corpora for path in corpus.paths)
        raise BadInput(f"--input {paths}: no text there (no files, or all of them empty)")
    _warn_of_large_groups(pieces)
    return pieces


def _warn_of_large_groups(pieces: list[tuple[int, Piece]]) -> None:
    """A row group or a batch is read by one worker, whose memory holds the tokens of all of it: say so of the largest."""
    tables = [piece for _, piece in pieces if piece.format in TABLES]
    largest = max(tables, key=lambda piece: piece.size, default=None)
    if largest is not None and largest.size > LARGE_GROUP:
        log.warning(
            f"{largest.path}: {largest.size >> 20:,} MiB that can't be cut, which one worker holds in memory; written "
            "as Parquet with a smaller row_group_size (10,000 rows, say) it is shared"
        )


def _sources(
    pieces: list[tuple[int, Piece]], options: BuildOptions, given: Tokenizer | None, recipe_file: str | None
) -> Iterator[str]:
    """Every file that a build reads."""
    models = [classifier.path for classifier in (options.language, options.quality) if classifier]
    named = [*models]
    if given is not None:
        named.append(str(given.path))
    if recipe_file is not None:
        named.append(recipe_file)
    yield from named
    yield from map(os.path.realpath, named)
    for _, piece in pieces:
        yield piece.path


def _job(corpora: Sequence[Corpus], options: BuildOptions, work: Path, on_error: str) -> Job:
    own = tuple(options.of(corpus) for corpus in corpora)
    return Job(
        options, "", str(work), on_error,
        held_limit=int(options.held_out * (1 << 64)), weights=tuple(corpus.weight for corpus in corpora),
        own=own if any(its != options.shared() for its in own) else (),
    )  # fmt: skip


def account_of(
    corpora: Sequence[Corpus], pieces: list[tuple[int, Piece]], options: BuildOptions, given: Tokenizer | None
) -> dict[str, Any]:
    """What a build is known by: options, corpora, tokenizer, and a digest of the files with their sizes and times."""
    digest = hashlib.blake2b(digest_size=16)
    for _, piece in pieces:
        digest.update(repr(piece).encode())
    return {
        "models": {c.path: sha256_of(Path(c.path)) for c in (options.language, options.quality) if c},
        "options": options.listed(given is None),
        "corpora": {
            corpus.name: {"paths": list(corpus.paths), "weight": corpus.weight} | own_options(corpus)
            for corpus in corpora
        },
        "tokenizer_sha256": None if given is None else given.sha256,
        output_folder.FILES: {
            "count": len({piece.path for _, piece in pieces}),
            "bytes": sum(piece.size for _, piece in pieces),
            "digest": digest.hexdigest(),
        },
    }


def own_options(corpus: Corpus) -> dict[str, Any]:
    """What a corpus reads and keeps in its own way, as accounts list it."""
    own: dict[str, Any] = {} if corpus.read is None else {"read": asdict(corpus.read)}
    if corpus.languages is not None:
        own["languages"] = list(corpus.languages)
    return own if corpus.filters is None else own | {"filters": list(corpus.filters)}


def _commit(folder: Path, made: Made, facts: dict[str, Any], account: dict[str, Any], recipe: str) -> None:
    """Everything but the manifests, then these, those of held-out parts first."""
    for dataset in made.datasets:
        for name, data in made.tokenizer.files().items():
            (dataset.folder / name).write_bytes(data)
    write_json(folder / output_folder.REPORT, facts)
    if recipe:
        write_whole(folder / output_folder.RECIPE, recipe.encode())
    write_json(folder / output_folder.ACCOUNT, account)
    for place, manifest in (entry for dataset in made.datasets for entry in dataset.manifests):
        if held_out := manifest["held_out"]:
            written = (place / output_folder.HELD_OUT / shards.MANIFEST).read_bytes()
            held_out["manifest_sha256"] = hashlib.sha256(written).hexdigest()
        shards.write_manifest(place, manifest)

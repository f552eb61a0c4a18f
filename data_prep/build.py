"""The build: its stages in order, from inputs to committed datasets.

It makes whole datasets or none: all work happens beside them, and a manifest is the last thing written. A stage is a map
over items of work that depend on nothing but the stages before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.common.errors import BadInput, Problems, Unfinished
from data_prep.executor import inputs, output_folder, work_files
from data_prep.executor.journal import Journal, Stage, write_json
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import TEXT_RULES, Done, Job, total
from data_prep.filters import classifiers
from data_prep.options import BuildOptions
from data_prep.readers.documents import LATER_RULES
from data_prep.readers.tasks import Corpus, Piece, Task, group, list_pieces
from data_prep.report import html_report, pair_checks, summary
from data_prep.stages import (
    decontaminate,
    dedup,
    read,
    sequences,
    shuffle,
    train_tokenizer,
    unpack,
    write,
)  # fmt: skip
from data_prep.text import clean, minhash
from megabert.common.atomic_io import write_whole
from megabert.data import shards
from megabert.data.tokenizer import Tokenizer


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
) -> dict[str, Any] | None:
    """Build a dataset a row length in `folder` and return a summary; None when it is there already. Rank 0 alone.

    Files that are `known` are left out; None also where that leaves none. `recipe` is stored with it. Stops before rows
    are written where most pairs would be random or many tokens be cut off, but for `allow`.

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
    with output_folder.opened(Path(folder), account, options.seq_lens, overwrite) as work:
        if work is None:
            return None
        with contextlib.closing(Journal(work, executor)) as journal:
            resumed = journal.holds_something()
            stages = Stages(journal, progress)
            ready = _make_ready(stages, _job(corpora, options, work, on_error), pieces, given)
            if parts_read:
                _check_parts(journal, ready)
            made = _run(stages, ready, Path(folder), given is None, allow)
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
    seconds = finished - made.began_reading
    megabytes = facts["read"]["bytes"] / 1e6
    return facts | {
        "seconds": seconds,
        "tokenizer_seconds": made.began_reading - began,
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
    with output_folder.joined(Path(folder), account, options.seq_lens) as work:
        if work is None:
            return None
        with contextlib.closing(Journal(work, executor)) as journal:
            stages = Stages(journal, progress)
            with output_folder.alone(work):
                _agree_on_parts(work, part)
                ready = _make_ready(stages, _job(corpora, options, work, on_error), pieces, given)
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
    corpora: Sequence[Corpus],
    options: BuildOptions,
    problems: Problems,
    known: inputs.Known | None = None,
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
    return pieces


def _job(corpora: Sequence[Corpus], options: BuildOptions, work: Path, on_error: str) -> Job:
    own = tuple(options.of(corpus) for corpus in corpora)
    return Job(
        options, "", str(work), on_error,
        held_limit=int(options.held_out * (1 << 64)), weights=tuple(corpus.weight for corpus in corpora),
        own=own if any(its != options.shared() for its in own) else (),
    )  # fmt: skip


class Stages:
    """Runs stages with a progress bar each on stderr; `everything` is the sum of what they report."""

    def __init__(self, journal: Journal, progress: bool) -> None:
        self.journal, self._progress = journal, progress
        self.everything = Done()
        self.figures: dict[
            str, dict[str, float]
        ] = {}  # of each stage: seconds, and bytes of its largest process

    def map(
        self,
        name: str,
        function: Any,
        job: Job,
        items: Sequence[Any],
        unit: str = "part",
        size: int | None = None,
    ) -> Stage:
        """`function(job, item)` of every item, or what an earlier process recorded of it; the bar has `size` steps."""
        began = time.perf_counter()
        with self._bar(name, len(items) if size is None else size, unit) as bar:
            stage = self.journal.map(name, function, job, items, lambda done: bar.update(done.size or 1))
        peak = max((done.peak for done in stage.results), default=0)
        self.figures[name] = {"seconds": time.perf_counter() - began, "peak_memory": peak}
        self.everything = total([self.everything, *stage.results])
        return stage

    def do_part(self, name: str, function: Any, job: Job, tasks: list[Task], part: tuple[int, int]) -> Done:
        """What a part of the tasks makes, or an earlier process did; the sum of what they report."""
        size = sum(task.size for task in tasks[part[0] - 1 :: part[1]])
        with self._bar(name, size, "B") as bar:
            return total(
                self.journal.do_part(name, function, job, tasks, part, lambda done: bar.update(done.size))
            )

    def _bar(self, name: str, size: int, unit: str) -> tqdm[Any]:
        return tqdm(
            total=size,
            desc=f"{name:13}",
            unit=unit,
            unit_scale=unit == "B",
            disable=not self._progress,
            file=sys.stderr,
            leave=False,
        )


@dataclass(frozen=True)
class WrittenDataset:
    """Written shards of one row length: (folder, manifest) of the held-out part, if there is one, then of the training part."""

    seq_len: int
    folder: Path
    manifests: list[tuple[Path, dict[str, Any]]]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Made:
    """All that the stages made. `documents` is the stage that read the input, which began at `began_reading` of the clock."""

    tokenizer: Tokenizer
    tasks: list[Task]
    documents: Stage
    datasets: list[WrittenDataset]
    began_reading: float
    contaminated: str | None  # the list of documents that overlap with evaluation texts


@dataclass(frozen=True)
class Ready:
    """What reading begins with; `unpacked` is the stage that unpacked large files, if there are any."""

    job: Job
    tokenizer: Tokenizer
    tasks: list[Task]
    unpacked: Stage | None


def _make_ready(stages: Stages, job: Job, pieces: list[tuple[int, Piece]], given: Tokenizer | None) -> Ready:
    tasks, unpacked = _tasks(stages, job, pieces)
    tokenizer = _tokenizer(stages, job, tasks, given)
    job = replace(job, tokenizer=str(tokenizer.path), tokenizer_sha256=tokenizer.sha256)
    if job.options.decontaminate:
        listed_files = tuple(decontaminate.files(job.options.decontaminate))
        stages.map("evaluation", decontaminate.index, job, [listed_files], unit="file")
    return Ready(job, tokenizer, tasks, unpacked)


def _run(stages: Stages, ready: Ready, folder: Path, trained: bool, allow: bool) -> Made:
    """The list of stages. Shards are in their place when it ends, manifests are not."""
    job, tokenizer, tasks, unpacked = ready.job, ready.tokenizer, ready.tasks, ready.unpacked
    options = job.options
    began_reading = time.perf_counter()
    size = sum(task.size for task in tasks)
    documents = stages.map("read", read.read_task, job, tasks, unit="B", size=size)
    if unpacked:
        stages.journal.consume(unpacked, documents)
    if options.decontaminate:
        stages.map("list", decontaminate.collect, job, [len(tasks)])
    compared, mask = _mark_duplicates(stages, job, documents)
    held_out = _hold_out(job, documents)
    job = replace(job, held_limit=held_out.limit)
    kept = [
        sequences.Kept(task.index, tuple(done.facts["units"]), task.corpus, mask)
        for task, done in zip(tasks, documents.results, strict=True)
    ]

    datasets = []
    for seq_len, place in output_folder.folders(folder, options.seq_lens).items():
        draws = sequences.train_draws(kept, seq_len)
        train = stages.map(f"pairs {seq_len}", sequences.draw, job, draws)
        groups = sequences.held_groups(kept, held_out.tokens, seq_len)
        held = stages.map(f"held out {seq_len}", sequences.draw, job, groups)
        if seq_len == options.seq_lens[-1]:
            for stage in (documents, *compared):
                stages.journal.consume(stage, train, held)
        pair_checks.check(total(train.results), seq_len, allow)
        listed = options.listed(trained)
        if any(done.counts[clean.BY_SCRIPT] for done in documents.results):
            listed["text_rules"] = TEXT_RULES
        if unpacked or documents_by_later_rules(tasks, documents):
            listed["reading_version"] = output_folder.READING_VERSION
        datasets.append(_dataset(stages, job, seq_len, train, held, tokenizer, place, listed))
    contaminated = job.path(output_folder.CONTAMINATED) if options.decontaminate else None
    return Made(tokenizer, tasks, documents, datasets, began_reading, contaminated)


def _tasks(stages: Stages, job: Job, pieces: list[tuple[int, Piece]]) -> tuple[list[Task], Stage | None]:
    """Tasks of reading, once all that must be unpacked first is; and the stage that did it, if there is anything."""
    items = unpack.parts(pieces)
    if not items:
        return group(pieces), None
    size = sum(item.piece.size for item in items)
    unpacked = stages.map("unpack", unpack.unpack, job, items, unit="B", size=size)
    return group(unpack.cut(job, pieces, items, unpacked.results)), unpacked


def documents_by_later_rules(tasks: list[Task], documents: Stage) -> bool:
    """Whether reading made other documents or other tasks than version 1 did: the manifest then names the version."""
    in_batches = any(piece.format == "arrow" and piece.start for task in tasks for piece in task.pieces)
    return in_batches or any(done.counts[LATER_RULES] for done in documents.results)


def _tokenizer(stages: Stages, job: Job, tasks: list[Task], given: Tokenizer | None) -> Tokenizer:
    """The tokenizer to use, in the work folder: a copy of the given one, or one trained on a sample."""
    if given is None:
        shares = train_tokenizer.shares(tasks, job.options, job.weights)
        samples = stages.map("sample", train_tokenizer.sample, job, shares)
        trained = stages.map("train", train_tokenizer.train_item, job, [len(shares)])
        stages.journal.consume(samples, trained)
        return Tokenizer.load(job.path(output_folder.TOKENIZERS[job.options.kind]))
    for name, data in given.files().items():
        write_whole(Path(job.path(name)), data)  # other jobs may be reading it
    return Tokenizer.load(job.path(given.file_name))


def _mark_duplicates(stages: Stages, job: Job, documents: Stage) -> tuple[list[Stage], str]:
    """The stages that compared documents and paragraphs, and which mask they leave: "" where nothing is compared."""
    chosen, tasks = job.options.dedup, len(documents.results)
    if not chosen:
        return [], ""
    count = sum(done.facts["documents"] for done in documents.results)
    made: list[Stage] = []
    drops = []
    for kind, records in (("documents", count), ("near", count * minhash.BANDS)):
        if kind in chosen:
            drops.append(_find_duplicates(stages, job, dedup.Runs(kind, "read", tasks), records, made))
    kept = stages.map("keep", dedup.mask_documents, job, dedup.task_masks(tasks, drops))
    made.append(kept)
    if "paragraphs" not in chosen:
        return made, "keep"
    paragraphs = sum(done.facts["paragraphs"] for done in kept.results)
    found = _find_duplicates(stages, job, dedup.Runs("paragraphs", "keep", tasks), paragraphs, made)
    made.append(stages.map("trim", dedup.mask_paragraphs, job, dedup.task_masks(tasks, [found])))
    return made, "trim"


def _find_duplicates(
    stages: Stages, job: Job, runs: dedup.Runs, records: int, made: list[Stage]
) -> dedup.Drops | list[dedup.Gather]:
    """Where the duplicates of a kind are listed; the stages that it took are added to `made`."""
    kind, tasks = runs.kind, runs.count
    merged = None
    if groups := dedup.merges(runs, records):
        merged = stages.map(f"merge {kind}", dedup.merge, job, groups)
        runs = groups[0].into
    found = stages.map(f"same {kind}", dedup.find, job, dedup.ranges(runs, records))
    if merged:
        stages.journal.consume(merged, found)
    if gathers := dedup.gathers(kind, len(found.results), tasks):
        gathered = stages.map(f"gather {kind}", dedup.gather, job, gathers)
        stages.journal.consume(found, gathered)
        made.append(gathered)
        return gathers
    made.append(found)
    return dedup.Drops(kind, kind, 0, len(found.results))


@dataclass(frozen=True)
class HeldOut:
    """Documents whose hash is below `limit` are held out; `tokens` is truthy for each task that has any."""

    limit: int
    tokens: list[int]


def _hold_out(job: Job, documents: Stage) -> HeldOut:
    """By the share that was asked for; of a small corpus the one document that comes first by hash, if there are two."""
    results = documents.results
    tokens = [done.counts["held-out tokens"] for done in results]
    if not job.held_limit or any(tokens) or sum(done.facts["documents"] for done in results) < 2:
        return HeldOut(job.held_limit, tokens)
    least = min(done.facts["least hash"] for done in results if done.facts["documents"])
    return HeldOut(least + 1, [int(done.facts.get("least hash") == least) for done in results])


def _dataset(
    stages: Stages,
    job: Job,
    seq_len: int,
    train: Stage,
    held: Stage,
    tokenizer: Tokenizer,
    folder: Path,
    listed: dict[str, Any],
) -> WrittenDataset:
    """Shuffle and write what the stages `train` and `held` drew; `listed` are the options as manifests list them."""
    train_drawn, held_drawn = total(train.results), total(held.results)
    lengths = train_drawn.histograms["tokens of a sequence"]
    slots = job.options.max_sequences or shuffle.choose_slots(lengths, seq_len)
    dtype, name = work_files.id_dtype(tokenizer).name, tokenizer.path.name
    held_folder, held_entry, manifests = folder / output_folder.HELD_OUT, None, []
    if held_drawn.counts["sequences"]:
        part = shuffle.Part("heldout", seq_len, slots, len(held.results), dtype, str(held_folder))
        entries = _shuffle_and_write(stages, job, held, part)
        manifest = write.manifest(part, entries, held_drawn, tokenizer, f"../{name}", listed, None)
        manifests.append((held_folder, manifest))
        held_entry = {"path": output_folder.HELD_OUT, "rows": manifest["rows"]}
    part = shuffle.Part("train", seq_len, slots, len(train.results), dtype, str(folder))
    entries = _shuffle_and_write(stages, job, train, part)
    manifest = write.manifest(part, entries, train_drawn, tokenizer, name, listed, held_entry)
    manifests.append((folder, manifest))
    return WrittenDataset(
        seq_len, folder, manifests, summary.dataset_facts(manifest, train_drawn, held_drawn)
    )


def _shuffle_and_write(stages: Stages, job: Job, drawn: Stage, part: shuffle.Part) -> list[dict[str, Any]]:
    """Pack and shuffle the sequences of the stage `drawn` and write them. Returns the entries of the shards."""
    Path(part.folder).mkdir(parents=True, exist_ok=True)
    tokens = total(drawn.results).counts["tokens"]
    shard_tokens = job.options.rows_per_shard * part.seq_len
    if groups := shuffle.merges(part, tokens, len(shuffle.buckets(part, tokens, shard_tokens))):
        merged = stages.map(f"merge {part.stem}", shuffle.merge, job, groups)
        stages.journal.consume(drawn, merged)
        drawn, part = merged, replace(part, runs=len(groups), merged=True)
    buckets = shuffle.buckets(part, tokens, shard_tokens)
    packed = stages.map(f"shuffle {part.stem}", shuffle.process_bucket, job, buckets, unit="bucket")
    stages.journal.consume(drawn, packed)
    rows = [done.counts["rows"] for done in packed.results]
    plans = write.plan_shards(part, rows, job.options.rows_per_shard)
    written = stages.map(f"write {part.stem}", write.process_shard, job, plans, unit="shard")
    stages.journal.consume(packed, written)
    return [done.facts["shard"] for done in written.results]


def account_of(
    corpora: Sequence[Corpus],
    pieces: list[tuple[int, Piece]],
    options: BuildOptions,
    given: Tokenizer | None,
) -> dict[str, Any]:
    """What a build is known by: options, corpora, tokenizer, and a digest of the files with their sizes and times."""
    digest = hashlib.blake2b(digest_size=16)
    for _, piece in pieces:
        digest.update(repr(piece).encode())
    named = {
        "evaluation files": {file.path: file.sha256 for file in decontaminate.files(options.decontaminate)},
        "models": {c.path: classifiers.digest(c.path) for c in (options.language, options.quality) if c},
    }
    return {name: files for name, files in named.items() if files} | {
        output_folder.VERSION: output_folder.READING_VERSION,
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
    write_json(folder / output_folder.REPORTS[0], facts)
    write_whole(folder / output_folder.REPORTS[1], html_report.render(facts).encode())
    if made.contaminated is not None:
        shutil.copyfile(made.contaminated, folder / output_folder.CONTAMINATED)
    if recipe:
        write_whole(folder / output_folder.RECIPE, recipe.encode())
    write_json(folder / output_folder.ACCOUNT, account)
    for place, manifest in (entry for dataset in made.datasets for entry in dataset.manifests):
        if held_out := manifest["held_out"]:
            written = (place / output_folder.HELD_OUT / shards.MANIFEST).read_bytes()
            held_out["manifest_sha256"] = hashlib.sha256(written).hexdigest()
        shards.write_manifest(place, manifest)

"""The stages of a build in their order, from listed files to written shards without manifests.

A stage is a map over items of work that depend on nothing but the stages before.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Journal, Stage
from data_prep.executor.work_files import Done, Job, total
from data_prep.readers.tasks import Piece, Task, group
from data_prep.report import pair_checks, summary
from data_prep.stages import dedup, read, sequences, shuffle, train_tokenizer, unpack, write
from data_prep.text import minhash
from megabert.common.files import write_whole
from megabert.data.tokenizer import Tokenizer

TRAINING_STAGES = "sample", "train"  # of the tokenizer


class Stages:
    """Runs stages with a progress bar each on stderr; `everything` is the sum of what they report."""

    def __init__(self, journal: Journal, progress: bool) -> None:
        self.journal, self._progress = journal, progress
        self.everything = Done()
        self.figures: dict[str, dict[str, float]] = {}  # of each stage: seconds, and bytes of its largest process

    def map(
        self, name: str, function: Any, job: Job, items: Sequence[Any], unit: str = "part", size: int | None = None
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
            return total(self.journal.do_part(name, function, job, tasks, part, lambda done: bar.update(done.size)))

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
    """All that the stages made. `documents` is the stage that read the input."""

    tokenizer: Tokenizer
    tasks: list[Task]
    documents: Stage
    datasets: list[WrittenDataset]


@dataclass(frozen=True)
class Ready:
    """What reading begins with; `unpacked` is the stage that unpacked large files, if there are any."""

    job: Job
    tokenizer: Tokenizer
    tasks: list[Task]
    unpacked: Stage | None


def make_ready(stages: Stages, job: Job, pieces: list[tuple[int, Piece]], given: Tokenizer | None) -> Ready:
    if given is not None:
        job.options.check_tokenizer(given)
    tasks, unpacked = _tasks(stages, job, pieces)
    tokenizer = _tokenizer(stages, job, tasks, given)
    job = replace(job, tokenizer=str(tokenizer.path), tokenizer_sha256=tokenizer.sha256)
    return Ready(job, tokenizer, tasks, unpacked)


def run_stages(stages: Stages, ready: Ready, folder: Path, trained: bool, allow: bool) -> Made:
    """The list of stages. Shards are in their place when it ends, manifests are not."""
    job, tokenizer, tasks, unpacked = ready.job, ready.tokenizer, ready.tasks, ready.unpacked
    options = job.options
    size = sum(task.size for task in tasks)
    documents = stages.map("read", read.read_task, job, tasks, unit="B", size=size)
    if unpacked:
        stages.journal.consume(unpacked, documents)
    compared, mask = _mark_duplicates(stages, job, documents)
    held_out = _hold_out(job, documents)
    job = replace(job, held_limit=held_out.limit)
    kept = [
        sequences.Kept(task.index, tuple(done.facts["units"]), task.corpus, mask)
        for task, done in zip(tasks, documents.results, strict=True)
    ]

    datasets = []
    for seq_len, place in output_folder.folders(folder, options.seq_lens).items():
        groups = sequences.held_groups(kept, held_out.tokens, seq_len)
        draws = sequences.train_draws(kept, seq_len)
        drawn = stages.map(f"pairs {seq_len}", sequences.draw, job, [*groups, *draws])
        if seq_len == options.seq_lens[-1]:
            for stage in (documents, *compared):
                stages.journal.consume(stage, drawn)
        pair_checks.check(total(drawn.results[len(groups) :]), seq_len, allow)
        listed = options.listed(trained)
        datasets.append(_dataset(stages, job, seq_len, drawn, len(groups), tokenizer, place, listed))
    return Made(tokenizer, tasks, documents, datasets)


def _tasks(stages: Stages, job: Job, pieces: list[tuple[int, Piece]]) -> tuple[list[Task], Stage | None]:
    """Tasks of reading, once all that must be unpacked first is; and the stage that did it, if there is anything."""
    items = unpack.parts(pieces)
    if not items:
        return group(pieces), None
    size = sum(item.piece.size for item in items)
    unpacked = stages.map("unpack", unpack.unpack, job, items, unit="B", size=size)
    return group(unpack.cut(job, pieces, items, unpacked.results)), unpacked


def _tokenizer(stages: Stages, job: Job, tasks: list[Task], given: Tokenizer | None) -> Tokenizer:
    """The tokenizer to use, in the work folder: a copy of the given one, or one trained on a sample."""
    if given is None:
        shares = train_tokenizer.shares(tasks, job.options, job.weights)
        sample, train = TRAINING_STAGES
        samples = stages.map(sample, train_tokenizer.sample, job, shares)
        trained = stages.map(train, train_tokenizer.train_item, job, [len(shares)])
        stages.journal.consume(samples, trained)
        return Tokenizer.load(job.path(output_folder.TOKENIZERS[job.options.kind]))
    for name, data in given.files().items():
        write_whole(Path(job.path(name)), data)  # other jobs may be reading it
    same = copy.copy(given)
    same.path = Path(job.path(given.file_name))
    return same


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
            drops.append(find_duplicates(stages, job, dedup.Runs(kind, "read", tasks), records, made))
    kept = stages.map("keep", dedup.mask_documents, job, dedup.task_masks(tasks, drops))
    made.append(kept)
    if "paragraphs" not in chosen:
        return made, "keep"
    paragraphs = sum(done.facts["paragraphs"] for done in kept.results)
    found = find_duplicates(stages, job, dedup.Runs("paragraphs", "keep", tasks), paragraphs, made)
    made.append(stages.map("trim", dedup.mask_paragraphs, job, dedup.task_masks(tasks, [found])))
    return made, "trim"


def find_duplicates(
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
    drawn: Stage,
    held_runs: int,
    tokenizer: Tokenizer,
    folder: Path,
    listed: dict[str, Any],
) -> WrittenDataset:
    """Shuffle and write what the stage `drawn` drew, the first `held_runs` of it held out; `listed` are the options as
    manifests list them."""
    held, train = drawn.results[:held_runs], drawn.results[held_runs:]
    held_drawn, train_drawn = total(held), total(train)
    lengths = train_drawn.histograms["tokens of a sequence"]
    slots = job.options.max_sequences or shuffle.choose_slots(lengths, seq_len)
    dtype, name = work_files.id_dtype(tokenizer).name, tokenizer.path.name
    held_folder, held_entry, manifests = folder / output_folder.HELD_OUT, None, []
    if held_drawn.counts["sequences"]:
        part = shuffle.Part("heldout", seq_len, slots, len(held), dtype, str(held_folder))
        entries = _shuffle_and_write(stages, job, held_drawn.counts["tokens"], part, None)
        manifest = write.manifest(part, entries, held_drawn, tokenizer, f"../{name}", listed, None)
        manifests.append((held_folder, manifest))
        held_entry = {"path": output_folder.HELD_OUT, "rows": manifest["rows"]}
    part = shuffle.Part("train", seq_len, slots, len(train), dtype, str(folder))
    entries = _shuffle_and_write(stages, job, train_drawn.counts["tokens"], part, drawn)
    manifest = write.manifest(part, entries, train_drawn, tokenizer, name, listed, held_entry)
    manifests.append((folder, manifest))
    return WrittenDataset(seq_len, folder, manifests, summary.dataset_facts(manifest, train_drawn, held_drawn))


def _shuffle_and_write(
    stages: Stages, job: Job, tokens: int, part: shuffle.Part, drawn: Stage | None
) -> list[dict[str, Any]]:
    """Pack and shuffle the sequences of a part, which are so many tokens, and write them. Returns the entries of the shards.

    `drawn` is the stage that drew them, where nothing else is left to be made of it.
    """
    Path(part.folder).mkdir(parents=True, exist_ok=True)
    shard_tokens = job.options.rows_per_shard * part.seq_len
    used = [] if drawn is None else [drawn]
    if groups := shuffle.merges(part, tokens, len(shuffle.buckets(part, tokens, shard_tokens))):
        merged = stages.map(f"merge {part.stem}", shuffle.merge, job, groups)
        for stage in used:
            stages.journal.consume(stage, merged)
        used, part = [merged], replace(part, runs=len(groups), merged=True)
    buckets = shuffle.buckets(part, tokens, shard_tokens)
    packed = stages.map(f"shuffle {part.stem}", shuffle.process_bucket, job, buckets, unit="bucket")
    for stage in used:
        stages.journal.consume(stage, packed)
    rows = [done.counts["rows"] for done in packed.results]
    plans = write.plan_shards(part, rows, job.options.rows_per_shard)
    written = stages.map(f"write {part.stem}", write.process_shard, job, plans, unit="shard")
    stages.journal.consume(packed, written)
    return [done.facts["shard"] for done in written.results]

"""A build makes whole datasets or none: all work happens beside them, and a manifest is the last thing written.

Stages, each a map over items of work that nothing depends on the order of: sample and train a tokenizer, read, mark
duplicates; then for each row length draw sequences, shuffle and write, the training part and the held-out one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.common.errors import BadInput, Problems
from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Journal, Stage, write_json
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import Done, Job, total
from data_prep.options import BLOCK_ROWS, BuildOptions
from data_prep.readers import tasks as sources
from data_prep.readers.tasks import Corpus, Task
from data_prep.report import html_report, summary
from data_prep.stages import dedup, sequences, shuffle, train_tokenizer
from data_prep.stages import read as reading
from data_prep.stages.sequences import Draw, Kept
from data_prep.text import minhash
from megabert.data import shards
from megabert.data.tokenizer import Tokenizer


class Meter:
    """A progress bar a stage on stderr."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._bar: Any = None

    @contextlib.contextmanager
    def stage(self, name: str, size: int, unit: str) -> Iterator[None]:
        self._bar = tqdm(
            total=size,
            desc=f"{name:13}",
            unit=unit,
            unit_scale=unit == "B",
            disable=not self._show,
            file=sys.stderr,
            leave=False,
        )
        try:
            yield
        finally:
            self._bar.close()

    def step(self, done: Done) -> None:
        self._bar.update(done.size or 1)


def account(
    corpora: Sequence[Corpus], tasks: list[Task], options: BuildOptions, tokenizer_file: str | None
) -> dict[str, Any]:
    """What a build is known by: options, corpora, tokenizer, and a digest of the files with their sizes and times."""
    pieces = [piece for task in tasks for piece in task.pieces]
    return {
        "options": options.listed(tokenizer_file is None),
        "corpora": {
            corpus.name: {"paths": list(corpus.paths), "weight": corpus.weight} for corpus in corpora
        },
        "tokenizer_sha256": None if tokenizer_file is None else Tokenizer.load(tokenizer_file).sha256,
        output_folder.FILES: {
            "count": len({piece.path for piece in pieces}),
            "bytes": sum(task.size for task in tasks),
            "digest": hashlib.blake2b(repr(pieces).encode(), digest_size=16).hexdigest(),
        },
    }


def build(
    corpora: Sequence[Corpus],
    folder: str | os.PathLike[str],
    options: BuildOptions,
    executor: Pool,
    tokenizer_file: str | None = None,
    overwrite: bool = False,
    on_error: str = "stop",
    progress: bool = True,
) -> dict[str, Any] | None:
    """Build a dataset a row length in `folder` and return a summary; None when it is there already. Rank 0 alone.

    The bytes depend on the inputs and `options` (and the tokenizer file) alone. Raises BadInput for what the user
    must change, ValueError for a bad tokenizer file, OSError when the disk is full.
    """
    began = time.perf_counter()
    options.check()
    problems = Problems(on_error)
    tasks = sources.plan(corpora, options.read, problems)
    if not tasks:
        paths = " ".join(path for corpus in corpora for path in corpus.paths)
        raise BadInput(f"--input {paths}: no text there (no files, or all of them empty)")
    known_by = account(corpora, tasks, options, tokenizer_file)
    with output_folder.opened(Path(folder), known_by, options.seq_lens, overwrite) as work:
        if work is None:
            return None
        journal = Journal(work, executor)
        with contextlib.closing(journal):
            run = Build(Path(folder), work, corpora, tasks, options, journal, on_error, Meter(progress))
            tokenizer = run.tokenize(tokenizer_file)
            started = time.perf_counter()
            run.read()
            datasets = {str(n): run.dataset(n, tokenizer) for n in options.seq_lens}
            journal.settle()
            finished = time.perf_counter()
            facts = summary.facts(
                known_by, corpora, tokenizer, run.read_by_corpus, run.everything, problems, datasets
            )
            run.commit(facts, known_by)
    seconds = finished - started
    read = run.read_by_corpus
    megabytes = sum(done.counts["bytes read"] for done in read.values()) / 1e6
    return facts | {
        "seconds": seconds,
        "tokenizer_seconds": started - began,
        "workers": executor.size,
        "resumed": run.resumed,
        # Of a build that went on, part of the work was done before the clock was started.
        "mb_per_second": None if run.resumed else megabytes / seconds,
        "mb_per_second_per_worker": None if run.resumed else megabytes / seconds / executor.size,
        "stage_seconds": dict(run.everything.seconds),
        "peak_memory": max(run.everything.peak, work_files.peak_memory()),
    }


class Build:
    """One run of the stages. Every method may be called again by a later process: what is done is not done twice."""

    def __init__(
        self,
        folder: Path,
        work: Path,
        corpora: Sequence[Corpus],
        tasks: list[Task],
        options: BuildOptions,
        journal: Journal,
        on_error: str,
        meter: Meter,
    ) -> None:
        self.options, self.tasks, self.corpora = options, tasks, corpora
        self._folders = output_folder.folders(folder, options.seq_lens)
        self._folder, self._work, self._meter = folder, work, meter
        self._journal = journal
        self.resumed = self._journal.holds_something()
        self._job = Job(
            options, "", str(work), on_error,
            held_limit=int(options.held_out * (1 << 64)), weights=tuple(corpus.weight for corpus in corpora),
        )  # fmt: skip
        self.everything = Done()
        self.read_by_corpus: dict[str, Done] = {}
        self._manifests: list[tuple[Path, dict[str, Any]]] = []

    def _map(
        self, name: str, function: Any, items: Sequence[Any], unit: str = "part", size: int | None = None
    ) -> Stage:
        with self._meter.stage(name, len(items) if size is None else size, unit):
            stage = self._journal.map(name, function, self._job, items, self._meter.step)
        self.everything = total([self.everything, *stage.results])
        return stage

    def tokenize(self, tokenizer_file: str | None) -> Tokenizer:
        """The tokenizer to use, in the work folder: a copy of the file, or one trained on a sample."""
        self._trained = tokenizer_file is None
        if tokenizer_file is None:
            shares = train_tokenizer.shares(self.tasks, self.options)
            samples = self._map("sample", train_tokenizer.sample, shares)
            trained = self._map("train", train_tokenizer.train_item, [len(shares)])
            self._journal.consume(samples, trained)
            path = self._work / "tokenizer.model"
        else:
            path = self._work / output_folder.TOKENIZERS[Tokenizer.load(tokenizer_file).kind]
            shutil.copyfile(tokenizer_file, path)
        tokenizer = Tokenizer.load(path)
        self._job = replace(self._job, tokenizer=str(path), tokenizer_sha256=tokenizer.sha256)
        self._tokenizer_path = path
        return tokenizer

    def read(self) -> None:
        """Read all tasks and mark duplicates. What is kept of each is then `self._kept`."""
        size = sum(task.size for task in self.tasks)
        stage = self._map("read", reading.read_task, self.tasks, "B", size)
        results = stage.results
        for i, corpus in enumerate(self.corpora):
            its = [done for task, done in zip(self.tasks, results, strict=True) if task.corpus == i]
            self.read_by_corpus[corpus.name] = total(its)
        self._spools = [stage]
        mask = self._deduplicate(results)
        self._kept = [
            Kept(task.index, tuple(done.facts["units"]), task.corpus, mask)
            for task, done in zip(self.tasks, results, strict=True)
        ]
        self._held_tokens = [done.counts["held-out tokens"] for done in results]
        if self._job.held_limit and not any(self._held_tokens):
            self._hold_out_first(results)

    def _hold_out_first(self, results: list[Done]) -> None:
        """A small corpus: hold out the one document that comes first by hash, where there is more than one."""
        if sum(done.facts["documents"] for done in results) < 2:
            return
        least = min(done.facts["least hash"] for done in results if done.facts["documents"])
        self._job = replace(self._job, held_limit=least + 1)
        self._held_tokens = [done.facts.get("least hash") == least for done in results]

    def _deduplicate(self, results: list[Done]) -> str:
        """Mark duplicates. Returns which mask applies, "" where none does."""
        options, tasks = self.options, len(self.tasks)
        documents = sum(done.facts["documents"] for done in results)
        kinds = []
        for kind, records in (("documents", documents), ("near", documents * minhash.BANDS)):
            if kind in options.dedup:
                parts = dedup.ranges(kind, "read", tasks, records)
                self._spools.append(self._map(f"same {kind}", dedup.find, parts))
                kinds.append((kind, len(parts)))
        if not options.dedup:
            return ""
        masks = [dedup.TaskMask(i, tuple(kinds)) for i in range(tasks)]
        kept = self._map("keep", dedup.mask_documents, masks)
        self._spools.append(kept)
        if "paragraphs" not in options.dedup:
            return "keep"
        paragraphs = sum(done.facts["paragraphs"] for done in kept.results)
        parts = dedup.ranges("paragraphs", "keep", tasks, paragraphs)
        self._spools.append(self._map("same paragraphs", dedup.find, parts))
        masks = [replace(mask, kinds=(("paragraphs", len(parts)),)) for mask in masks]
        self._spools.append(self._map("trim", dedup.mask_paragraphs, masks))
        return "trim"

    def dataset(self, seq_len: int, tokenizer: Tokenizer) -> dict[str, Any]:
        """Make the shards of one row length. Returns its figures; manifests are written by `commit`."""
        folder = self._folders[seq_len]
        train = self._map(
            f"pairs {seq_len}", sequences.draw,
            [Draw("train", i, seq_len, (part,)) for i, part in enumerate(self._kept)],
        )  # fmt: skip
        groups = sequences.held_groups(self._kept, self._held_tokens, seq_len)
        held = self._map(f"held out {seq_len}", sequences.draw, groups)
        if seq_len == self.options.seq_lens[-1]:
            for stage in self._spools:
                self._journal.consume(stage, train, held)
        drawn = total(train.results)
        if drawn.counts["tokens"] < seq_len:
            raise BadInput(
                f"--input: the corpus makes only {drawn.counts['tokens']} tokens, less than one row of {seq_len}; give more text"
            )
        lengths = drawn.histograms["tokens of a sequence"]
        slots = self.options.max_sequences or shuffle.choose_slots(lengths, seq_len)
        held_drawn, held_entry = total(held.results), None
        if held_drawn.counts["sequences"]:
            held_folder = folder / output_folder.HELD_OUT
            entries = self._write(held, "heldout", seq_len, slots, held_folder, tokenizer)
            manifest = self._manifest(
                seq_len, slots, tokenizer, "../" + self._tokenizer_path.name, held_drawn, entries, None
            )
            self._manifests.append((held_folder, manifest))
            held_entry = {"path": output_folder.HELD_OUT, "rows": manifest["rows"]}
        entries = self._write(train, "train", seq_len, slots, folder, tokenizer)
        manifest = self._manifest(
            seq_len, slots, tokenizer, self._tokenizer_path.name, drawn, entries, held_entry
        )
        self._manifests.append((folder, manifest))
        return summary.dataset_facts(manifest, drawn, held_drawn)

    def _write(
        self, drawn: Stage, kind: str, seq_len: int, slots: int, folder: Path, tokenizer: Tokenizer
    ) -> list[dict[str, Any]]:
        """Shuffle, pack and write the sequences that a stage drew. Returns the entries of the shards."""
        folder.mkdir(parents=True, exist_ok=True)
        part = shuffle.Part(
            kind, seq_len, slots, len(drawn.results), work_files.id_dtype(tokenizer).name, str(folder)
        )
        tokens = total(drawn.results).counts["tokens"]
        if groups := shuffle.merges(part, tokens):
            merged = self._map(f"merge {part.stem}", shuffle.merge, groups)
            self._journal.consume(drawn, merged)
            drawn, part = merged, replace(part, runs=len(groups), merged=True)
        parts = shuffle.buckets(part, tokens, self.options.rows_per_shard * seq_len)
        packed = self._map(f"shuffle {part.stem}", shuffle.process_bucket, parts, "bucket")
        self._journal.consume(drawn, packed)
        rows = [done.counts["rows"] for done in packed.results]
        plans = shuffle.plan_shards(part, rows, self.options.rows_per_shard)
        written = self._map(f"write {part.stem}", shuffle.process_shard, plans, "shard")
        self._journal.consume(packed, written)
        return [done.facts["shard"] for done in written.results]

    def _manifest(
        self,
        seq_len: int,
        slots: int,
        tokenizer: Tokenizer,
        tokenizer_name: str,
        drawn: Done,
        entries: list[dict[str, Any]],
        held_out: dict[str, Any] | None,
    ) -> dict[str, Any]:
        rows = sum(entry["rows"] for entry in entries)
        return {
            "schema": 1,
            "seq_len": seq_len,
            "max_sequences": slots,
            "rows": rows,
            "block_rows": BLOCK_ROWS,
            "dtype": work_files.id_dtype(tokenizer).name,
            "tokenizer": {
                "kind": tokenizer.kind,
                "file": tokenizer_name,
                "sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "special_ids": tokenizer.special_ids,
            },
            "statistics": summary.statistics(drawn, rows, seq_len),
            "options": self.options.listed(self._trained),
            "shards": entries,
            "held_out": held_out,
        }

    def commit(self, facts: dict[str, Any], known_by: dict[str, Any]) -> None:
        """Everything but the manifests, then these, those of held-out parts first."""
        for folder in self._folders.values():
            shutil.copyfile(self._tokenizer_path, folder / self._tokenizer_path.name)
        write_json(self._folder / output_folder.REPORTS[0], facts)
        (self._folder / output_folder.REPORTS[1]).write_text(html_report.render(facts), encoding="utf-8")
        write_json(self._folder / output_folder.ACCOUNT, known_by)
        for folder, manifest in self._manifests:
            if held_out := manifest["held_out"]:
                written = (folder / output_folder.HELD_OUT / shards.MANIFEST).read_bytes()
                held_out["manifest_sha256"] = hashlib.sha256(written).hexdigest()
            shards.write_manifest(folder, manifest)

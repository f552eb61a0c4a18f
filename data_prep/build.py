"""A build makes a whole dataset or none: all work happens beside it and the manifest is the last thing written."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep import shuffle, sources, tokenizer_training, units
from data_prep.options import BLOCK_ROWS, BuildOptions
from data_prep.parallel import Local, Ranks
from data_prep.problems import BadInput, Problems
from data_prep.sources import Corpus
from data_prep.units import Done, Job
from megabert import shards
from megabert.tokenizer import Tokenizer

WORK = ".work"
TOKENIZER = "tokenizer.model"
MANIFEST = "manifest.json"
HELD_OUT = "held_out"
_OURS = (WORK, TOKENIZER, HELD_OUT)


def _is_ours(name: str) -> bool:
    return name in _OURS or (
        name.startswith(("shard-", ".shard-", ".manifest")) and name.endswith((".tar", ".tmp"))
    )


def prepare_output(output: Path, overwrite: bool) -> bool:
    """Make an empty folder of `output`, or refuse. Returns whether it was created.

    A finished dataset needs `overwrite`; what an unfinished build left is cleared; other files are never touched.
    """
    if output.exists() and not output.is_dir():
        raise BadInput(f"--output {output}: is a file; name a folder")
    if not output.exists():
        output.mkdir(parents=True)
        return True
    names = sorted(os.listdir(output))
    foreign = [name for name in names if not _is_ours(name) and name != MANIFEST]
    if foreign:
        raise BadInput(
            f"--output {output}: holds {foreign[0]}, which is no part of a dataset; name another folder"
        )
    if MANIFEST in names:
        if not overwrite:
            raise BadInput(f"--output {output}: already holds a dataset; --overwrite replaces it")
        (output / MANIFEST).unlink()  # first, so that it is never whole in name and mixed in content
    clear_output(output)
    return False


def clear_output(output: Path) -> None:
    """Remove the parts of an unfinished dataset."""
    for name in sorted(os.listdir(output)):
        path = output / name
        if name in (WORK, HELD_OUT):
            shutil.rmtree(path)
        elif _is_ours(name):
            path.unlink()


@contextlib.contextmanager
def _whole_or_none(output: Path, overwrite: bool) -> Iterator[Path]:
    created = prepare_output(output, overwrite)
    try:
        (output / WORK).mkdir()
        yield output / WORK
        shutil.rmtree(output / WORK)
    except BaseException:
        (output / MANIFEST).unlink(missing_ok=True)
        clear_output(output)
        if created:
            output.rmdir()
        raise


class Meter:
    """Sums what items of work report and moves the progress bar."""

    def __init__(self, show: bool) -> None:
        self.total = Done()
        self.peaks: dict[str, int] = {}
        self._show = show
        self._bar: Any = None

    @contextlib.contextmanager
    def stage(self, name: str, total: int, unit: str, factor: int = 1) -> Iterator[None]:
        """A progress bar over `total`; under MPI each result of rank 0 stands for `factor` of them."""
        self._factor = factor
        self._bar = tqdm(
            total=total,
            desc=f"{name:9}",
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

    def step(self, done: Any) -> None:
        """Callback for a result: counts its `size` in bytes, or one part."""
        self._bar.update((getattr(done, "size", 0) or 1) * self._factor)


def _sum(results: list[Done]) -> Done:
    total = Done()
    for done in results:
        total.counts.update(done.counts)
        for name, seconds in done.seconds.items():
            total.seconds[name] += seconds
        total.problems.update(done.problems)
        total.units += done.units
        total.held += done.held
        total.lengths.update(done.lengths)
        total.least_hash = min(total.least_hash, done.least_hash)
        total.peak = max(total.peak, done.peak)
    return total


def _statistics(total: Done, rows: int, seq_len: int, text_bytes: int) -> dict[str, Any]:
    c = total.counts
    return {
        "documents": c["documents"],
        "sentences": c["sentences"],
        "corpus_tokens": c["corpus tokens"],
        "tokens": c["tokens"],
        "sequences": c["sequences"],
        "text_bytes": text_bytes,
        "fill": round(c["tokens"] / (rows * seq_len), 6),
        "random_next_share": round(c["random next"] / c["pairs"], 6) if c["pairs"] else None,
    }


def build(
    inputs: list[str],
    output: str | os.PathLike[str],
    options: BuildOptions,
    executor: Local | Ranks,
    tokenizer_file: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Build a dataset in the folder `output` and return its summary. Call on rank 0 alone.

    The bytes depend on the inputs and `options` (and the tokenizer file) alone. Raises BadInput for what the user
    must change, ValueError for a bad tokenizer file, OSError when the disk is full; then nothing is left in `output`.
    """
    began = time.perf_counter()
    options.check()
    problems = Problems(options.on_error)
    if tokenizer_file is not None:
        Tokenizer.load(tokenizer_file)
    tasks = sources.plan([Corpus("input", tuple(inputs))], options.read, problems)
    if not tasks:
        raise BadInput(f"--input {' '.join(inputs)}: no text there (no files, or all of them empty)")
    meter = Meter(progress)
    factor = executor.size if isinstance(executor, Ranks) else 1
    output = Path(output)
    with _whole_or_none(output, overwrite) as work:
        job = Job(options, str(output / TOKENIZER), str(work), int(options.held_out * (1 << 64)))
        training = -time.perf_counter()
        if tokenizer_file is None:
            chosen = tokenizer_training.shares(tasks, options)
            with meter.stage("sample", len(chosen), "part", factor):
                samples = executor.map(partial(tokenizer_training.sample, job), chosen, meter.step)
            (output / TOKENIZER).write_bytes(tokenizer_training.train(samples, options))
            del samples
        else:
            shutil.copyfile(tokenizer_file, output / TOKENIZER)
        training += time.perf_counter()
        tokenizer = Tokenizer.load(output / TOKENIZER)

        def read_all(job: Job) -> Done:
            with meter.stage("read", sum(task.size for task in tasks), "B", factor):
                return _sum(executor.map(partial(units.process_task, job), tasks, meter.step))

        started = time.perf_counter()
        read = read_all(job)
        if job.held_limit and not read.held and read.counts["documents"] > 1:
            # A small corpus: hold out the one document that comes first by hash.
            for path in work.iterdir():
                path.unlink()
            job = replace(job, held_limit=read.least_hash + 1)
            read = read_all(job)
        if read.counts["tokens"] < options.seq_len:
            raise units.too_small(read.counts["tokens"], options.seq_len)
        slots = options.max_sequences or shuffle.choose_slots(read.lengths, options.seq_len)
        job = replace(job, slots=slots)
        held_entry, held_done = None, Done()
        if read.held:
            with meter.stage("held out", 1, "part"):
                groups = units.held_groups(read.held)
                held_done = _sum(executor.map(partial(units.process_held, job), groups, meter.step))
            (output / HELD_OUT).mkdir()
            written = _write_rows(
                job, executor, meter, factor, "heldout", held_done, output / HELD_OUT, tokenizer
            )
            held_done = _sum([held_done, written[2]])
            held_manifest = _manifest(
                job, tokenizer, "../" + TOKENIZER, tokenizer_file is None, written[:2], held_done,
                read.counts["held-out bytes"], None,
            )  # fmt: skip
            shards.write_manifest(output / HELD_OUT, held_manifest)
            digest = hashlib.sha256((output / HELD_OUT / MANIFEST).read_bytes()).hexdigest()
            held_entry = {"path": HELD_OUT, "rows": held_manifest["rows"], "manifest_sha256": digest}
        written = _write_rows(job, executor, meter, factor, "train", read, output, tokenizer)
        total = _sum([read, written[2]])
        manifest = _manifest(
            job, tokenizer, TOKENIZER, tokenizer_file is None, written[:2], total,
            total.counts["bytes"], held_entry,
        )  # fmt: skip
        problem_counts = Counter(problems.counts) + total.problems
        manifest["statistics"]["dropped"] = dict(sorted(problem_counts.items()))
        manifest["statistics"]["nuls_removed"] = total.counts["nuls"]
        manifest["statistics"]["empty_documents"] = total.counts["empty documents"]
        seconds = time.perf_counter() - started
    shards.write_manifest(output, manifest)
    all_bytes = total.counts["bytes"] + total.counts["held-out bytes"]
    return {
        **manifest["statistics"],
        "rows": manifest["rows"],
        "shards": len(manifest["shards"]),
        "shard_bytes": sum(entry["bytes"] for entry in manifest["shards"]),
        "held_out_documents": held_done.counts["documents"],
        "held_out_rows": held_entry["rows"] if held_entry else 0,
        "vocab_size": tokenizer.vocab_size,
        "workers": executor.size,
        "all_text_bytes": all_bytes,
        "seconds": seconds,
        "tokenizer_seconds": training,
        "total_seconds": time.perf_counter() - began,
        "mb_per_second": all_bytes / 1e6 / seconds,
        "mb_per_second_per_worker": all_bytes / 1e6 / seconds / executor.size,
        "stage_seconds": dict(_sum([total, held_done]).seconds),
        "peak_memory": max(total.peak, held_done.peak, units.peak_memory()),
    }


def _write_rows(
    job: Job,
    executor: Local | Ranks,
    meter: Meter,
    factor: int,
    kind: str,
    source: Done,
    folder: Path,
    tokenizer: Tokenizer,
) -> tuple[int, list[dict[str, Any]], Done]:
    """Shuffle, pack and write all units of `source`. Returns (rows, shard entries, what it took)."""
    dtype = units.id_dtype(tokenizer).name
    parts = shuffle.buckets(kind, source.units, dtype, job.options.rows_per_shard * job.options.seq_len)
    with meter.stage("shuffle", len(parts), "bucket", factor):
        packed = executor.map(partial(shuffle.process_bucket, job), parts, meter.step)
    for name, _, _ in source.units:
        for suffix in (".meta", ".ids"):
            os.unlink(os.path.join(job.work, name + suffix))
    counts = [done.counts["rows"] for done in packed]
    plans = shuffle.plan_shards(kind, counts, job.options.rows_per_shard, str(folder), dtype)
    with meter.stage("write", len(plans), "shard", factor):
        written = executor.map(partial(shuffle.process_shard, job), plans, meter.step)
    return sum(counts), [entry for entry, _ in written], _sum([*packed, *(done for _, done in written)])


def _manifest(
    job: Job,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    trained: bool,
    written: tuple[int, list[dict[str, Any]]],
    total: Done,
    text_bytes: int,
    held_out: dict[str, Any] | None,
) -> dict[str, Any]:
    options = job.options
    rows, entries = written
    return {
        "schema": 1,
        "seq_len": options.seq_len,
        "max_sequences": job.slots,
        "rows": rows,
        "block_rows": BLOCK_ROWS,
        "dtype": units.id_dtype(tokenizer).name,
        "tokenizer": {
            "kind": "sentencepiece",
            "file": tokenizer_name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": tokenizer.special_ids,
        },
        "statistics": _statistics(total, rows, options.seq_len, text_bytes),
        "options": options.manifest(trained),
        "shards": entries,
        "held_out": held_out,
    }

"""Shards of a dataset and its manifest, from the shuffled rows of all buckets."""

from __future__ import annotations

import hashlib
import io
import math
import os
import shutil
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import BuildJob, ItemResult
from data_prep.options import BLOCK_ROWS
from data_prep.stages.sequences import HELD, RowSplit
from megabert.common import storage
from megabert.common.files import write_atomically
from megabert.data import shards
from megabert.data.shards.manifest import SHARD, SOURCES

# counts in a manifest's statistics. For pairs, `tokens` - 3 `sequences` = corpus + borrowed - truncated tokens.
COUNTS = ("documents", "sentences", "corpus tokens", "borrowed tokens", "truncated tokens", "tokens", "sequences")


class WrittenSplit(NamedTuple):
    """Folder with shards, its manifest, which is not written yet, and the totals of its sequences."""

    folder: Path
    manifest: dict[str, Any]
    drawn: ItemResult


@dataclass(frozen=True)
class ShardPlan:
    """Rows [first_row, first_row + rows) of a split as slices (bucket, first row in it, rows of it)."""

    split: RowSplit
    index: int
    first_row: int
    rows: int
    slices: tuple[tuple[int, int, int], ...]


def run(
    stages: Stages,
    job: BuildJob,
    split: RowSplit,
    drawn: ItemResult,
    packed: list[ItemResult],
    unknown: dict[str, float],
    held: WrittenSplit | None,
) -> WrittenSplit:
    """Write the shards of a split from the rows of `packed`, and their sources if recorded. Deletes stale shards, and
    a stale held-out part, of a build that was resumed with changed input.

    `drawn`: totals of the split's sequences; `unknown`: see `read.unknown`; `held`: the held-out part of the dataset.
    """
    folder, tokenizer = Path(split.folder), work_files.job_tokenizer(job)
    folder.mkdir(parents=True, exist_ok=True)
    sources = {}
    if job.sources and split.kind == HELD:
        (saved,) = stages.map(f"sources {split.seq_len}", save_sources, job, [(split, len(packed))])
        sources = saved.facts
    plans = plan_shards(split, [result.counts["rows"] for result in packed], job.options.rows_per_shard)
    written = stages.map(f"write {split.stem}", process_shard, job, plans, unit="shard")
    stages.consume(f"shuffle {split.stem}")
    output_folder.remove_others(folder, SHARD.replace("{:06d}", "*"), written)
    held_out: dict[str, Any] | None = None
    if held is not None:
        held_out = {"path": output_folder.HELD_OUT, "rows": held.manifest["rows"]}
        if job.passage:
            held_out |= {"passages": held.drawn.counts["passages"], "passage_tokens": job.passage}
    elif (folder / output_folder.HELD_OUT).exists():
        shutil.rmtree(folder / output_folder.HELD_OUT)
    counts, rows = drawn.counts, sum(plan.rows for plan in plans)
    manifest = {
        "schema": 1,
        "seq_len": split.seq_len,
        "max_sequences": split.slots,
        "rows": rows,
        "block_rows": BLOCK_ROWS,
        "dtype": work_files.id_dtype(job).name,
        "tokenizer": {
            "kind": tokenizer.kind,
            "file": f"{'../' * (split.kind == HELD)}{tokenizer.path.name}",
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": tokenizer.special_ids,
        },
        "statistics": {
            **{name.replace(" ", "_"): counts[name] for name in COUNTS},
            "text_bytes": counts["bytes"],
            "fill": round(counts["tokens"] / (rows * split.seq_len), 6),
            "random_next_share": round(counts["random next"] / counts["pairs"], 6) if counts["pairs"] else None,
            **{f"unknown_{name}": unknown[name] for name in ("token_share", "character_share")},
        },
        "held_out": held_out,
        "order": 2,
        "shards": [result.facts["shard"] for result in written],
        **sources,
    }
    return WrittenSplit(folder, manifest, drawn)


def plan_shards(split: RowSplit, bucket_rows: list[int], rows_per_shard: int) -> list[ShardPlan]:
    """Cut the rows of all buckets, in order, into shards."""
    edges = list(accumulate(bucket_rows, initial=0))  # of buckets, in rows
    plans: list[ShardPlan] = []
    for first, end in pairwise([*range(0, edges[-1], rows_per_shard), edges[-1]]):
        slices = []
        for bucket in range(bisect_right(edges, first) - 1, bisect_left(edges, end)):
            begin = max(first, edges[bucket])
            if rows := min(end, edges[bucket + 1]) - begin:
                slices.append((bucket, begin - edges[bucket], rows))
        plans.append(ShardPlan(split, len(plans), first, end - first, tuple(slices)))
    return plans


def process_shard(job: BuildJob, plan: ShardPlan) -> ItemResult:
    """Write one shard, and upload it if the output is a URL; the fact "shard" is its entry of the manifest."""
    split, result = plan.split, ItemResult()

    def read_rows(suffix: str, dtype: np.dtype | str, *shape: int) -> np.ndarray:
        width = math.prod(shape)
        parts = [
            work_files.read(job, f"{split.stem}-{bucket:06d}.rows.{suffix}", dtype, first * width, rows * width)
            for bucket, first, rows in plan.slices
        ]
        return np.concatenate(parts).reshape(plan.rows, *shape)

    path = Path(split.folder, SHARD.format(plan.index))
    result.facts["shard"] = shards.write_shard(
        path,
        first_block=plan.first_row // BLOCK_ROWS,
        ids=read_rows("ids", work_files.id_dtype(job), split.seq_len),
        bounds=read_rows("bounds", "uint16", split.slots, 2),
        isnext=read_rows("labels", "int8", split.slots),
        block_rows=BLOCK_ROWS,
    )
    if job.url:
        storage.put(path, storage.join(job.url, os.path.relpath(path, job.output)))
    work_files.record_output(job, path, result)
    return result


def save_sources(job: BuildJob, item: tuple[RowSplit, int]) -> ItemResult:
    """Write SOURCES, uint8 [rows, S, 2], of a split; the fact "sources" is its entry of the manifest."""
    result, (split, buckets) = ItemResult(), item
    names = [f"{split.stem}-{bucket:06d}.rows.sources" for bucket in range(buckets)]
    rows = np.concatenate([work_files.read(job, name, "uint8") for name in names]).reshape(-1, split.slots, 2)
    with io.BytesIO() as file:
        np.save(file, rows, allow_pickle=False)
        data = file.getvalue()
    path = Path(split.folder, SOURCES)
    write_atomically(path, data)
    result.facts["sources"] = {"file": SOURCES, "sha256": hashlib.sha256(data).hexdigest(), "names": list(job.sources)}
    work_files.record_output(job, path, result)
    return result

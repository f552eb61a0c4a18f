"""Shards of a dataset and its manifest, from the shuffled rows of all buckets."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Stage, Stages
from data_prep.executor.work_files import BuildJob, ItemResult
from data_prep.options import BLOCK_ROWS
from data_prep.stages.shuffle import RowSplit
from megabert.common import storage
from megabert.common.files import write_whole
from megabert.data import shards
from megabert.data.shards.manifest import SHARD, SOURCES
from megabert.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class ShardPlan:
    """Rows [first_row, first_row + rows) of a split as slices (bucket, first row in it, rows of it)."""

    split: RowSplit
    index: int
    first_row: int
    rows: int
    slices: tuple[tuple[int, int, int], ...]


def run(stages: Stages, job: BuildJob, split: RowSplit, packed: Stage) -> dict[str, Any]:
    """Write the shards of a split from the rows of the stage `packed`, and their sources if recorded, and remove other shards, of
    the input before a resume. Returns the fields of the manifest that name the files."""
    Path(split.folder).mkdir(parents=True, exist_ok=True)
    kept: list[Stage] = []
    if job.sources and split.kind == "heldout":
        kept = [stages.map(f"sources {split.seq_len}", save_sources, job, [(split, len(packed.results))])]
    rows = [result.counts["rows"] for result in packed.results]
    plans = plan_shards(split, rows, job.options.rows_per_shard)
    written = stages.map(f"write {split.stem}", process_shard, job, plans, unit="shard")
    stages.journal.consume(packed, written, *kept)
    made = {"shards": [result.facts["shard"] for result in written.results]}
    output_folder.remove_others(Path(split.folder), SHARD.replace("{:06d}", "*"), written.results)
    return made | {"sources": kept[0].results[0].facts["sources"]} if kept else made


def plan_shards(split: RowSplit, bucket_rows: list[int], rows_per_shard: int) -> list[ShardPlan]:
    """Cut the rows of all buckets, in order, into shards."""
    plans: list[ShardPlan] = []
    slices: list[tuple[int, int, int]] = []
    rows = 0  # in `slices`

    def end_shard() -> None:
        nonlocal slices, rows
        plans.append(ShardPlan(split, len(plans), len(plans) * rows_per_shard, rows, tuple(slices)))
        slices, rows = [], 0

    for bucket, size in enumerate(bucket_rows):
        taken = 0
        while taken < size:
            some = min(size - taken, rows_per_shard - rows)
            slices.append((bucket, taken, some))
            taken, rows = taken + some, rows + some
            if rows == rows_per_shard:
                end_shard()
    if rows:
        end_shard()
    return plans


def process_shard(job: BuildJob, plan: ShardPlan) -> ItemResult:
    """Write one shard, and upload it if the output is a URL; the fact "shard" is its entry of the manifest."""
    result = ItemResult()
    split = plan.split
    arrays = []
    for suffix, dtype, shape in (
        ("ids", split.dtype, (split.seq_len,)),
        ("bounds", "uint16", (split.slots, 2)),
        ("labels", "int8", (split.slots,)),
    ):
        width = int(np.prod(shape))
        parts = [
            work_files.read(job, f"{split.stem}-{bucket:06d}.rows.{suffix}", dtype, first * width, rows * width)
            for bucket, first, rows in plan.slices
        ]
        arrays.append(np.concatenate(parts).reshape(plan.rows, *shape))
    path = Path(split.folder, SHARD.format(plan.index))
    ids, bounds, labels = arrays
    entry = shards.write_shard(path, plan.first_row // BLOCK_ROWS, ids, bounds, labels, BLOCK_ROWS)
    if job.upload[1]:
        storage.put(path, storage.join(job.upload[1], os.path.relpath(path, job.upload[0])))
    result.facts["shard"] = entry
    result.files[os.path.relpath(path, job.work)] = work_files.checksum(path)
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
    write_whole(path, data)
    result.facts["sources"] = {"file": SOURCES, "sha256": hashlib.sha256(data).hexdigest(), "names": list(job.sources)}
    result.files[os.path.relpath(path, job.work)] = work_files.checksum(path)
    return result


def manifest(
    split: RowSplit,
    made: dict[str, Any],
    drawn: ItemResult,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    options: dict[str, Any],
    held_out: dict[str, Any] | None,
) -> dict[str, Any]:
    """The manifest of the result of `run`; `tokenizer_name`: the tokenizer's path relative to the folder."""
    rows = sum(entry["rows"] for entry in made["shards"])
    return {
        "schema": 1,
        "seq_len": split.seq_len,
        "max_sequences": split.slots,
        "rows": rows,
        "block_rows": BLOCK_ROWS,
        "dtype": split.dtype,
        "tokenizer": {
            "kind": tokenizer.kind,
            "file": tokenizer_name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": tokenizer.special_ids,
        },
        "statistics": statistics(drawn, rows, split.seq_len),
        "options": options,
        "held_out": held_out,
        "order": 2,
    } | made


def statistics(drawn: ItemResult, rows: int, seq_len: int) -> dict[str, Any]:
    """The statistics in a manifest. For pairs, `tokens` - 3 `sequences` = corpus + borrowed - truncated tokens."""
    c = drawn.counts
    return {
        "documents": c["documents"],
        "sentences": c["sentences"],
        "corpus_tokens": c["corpus tokens"],
        "borrowed_tokens": c["borrowed tokens"],
        "truncated_tokens": c["truncated tokens"],
        "tokens": c["tokens"],
        "sequences": c["sequences"],
        "text_bytes": c["bytes"],
        "fill": round(c["tokens"] / (rows * seq_len), 6),
        "random_next_share": round(c["random next"] / c["pairs"], 6) if c["pairs"] else None,
    }

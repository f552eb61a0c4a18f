"""Shards of a dataset and its manifest, from the shuffled rows of all buckets."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.executor import work_files
from data_prep.executor.work_files import Done, Job
from data_prep.options import BLOCK_ROWS
from data_prep.stages.shuffle import Part
from megabert.data import shards
from megabert.data.shards.manifest import SHARD
from megabert.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class ShardPlan:
    """Rows [first_row, first_row + rows) of a part as pieces (bucket, first row in it, rows of it)."""

    part: Part
    index: int
    first_row: int
    rows: int
    pieces: tuple[tuple[int, int, int], ...]


def plan_shards(part: Part, bucket_rows: list[int], rows_per_shard: int) -> list[ShardPlan]:
    """Cut the rows of all buckets, in order, into shards."""
    plans: list[ShardPlan] = []
    pieces: list[tuple[int, int, int]] = []
    rows = 0  # in `pieces`

    def end_shard() -> None:
        nonlocal pieces, rows
        plans.append(ShardPlan(part, len(plans), len(plans) * rows_per_shard, rows, tuple(pieces)))
        pieces, rows = [], 0

    for bucket, size in enumerate(bucket_rows):
        taken = 0
        while taken < size:
            some = min(size - taken, rows_per_shard - rows)
            pieces.append((bucket, taken, some))
            taken, rows = taken + some, rows + some
            if rows == rows_per_shard:
                end_shard()
    if rows:
        end_shard()
    return plans


def process_shard(job: Job, plan: ShardPlan) -> Done:
    """Write one shard; its manifest entry is the fact "shard"."""
    done = Done()
    before = time.perf_counter()
    part = plan.part
    arrays = []
    for suffix, dtype, shape in (
        ("ids", part.dtype, (part.seq_len,)),
        ("bounds", "uint16", (part.slots, 2)),
        ("labels", "int8", (part.slots,)),
    ):
        width = int(np.prod(shape))
        parts = [
            work_files.read(job, f"{part.stem}-{bucket:06d}.rows.{suffix}", dtype, first * width, rows * width)
            for bucket, first, rows in plan.pieces
        ]
        arrays.append(np.concatenate(parts).reshape(plan.rows, *shape))
    path = Path(part.folder, SHARD.format(plan.index))
    ids, bounds, labels = arrays
    entry = shards.write_shard(path, plan.first_row // BLOCK_ROWS, ids, bounds, labels, BLOCK_ROWS)
    done.facts["shard"] = entry
    done.files[os.path.relpath(path, job.work)] = work_files.checksum(path)
    done.seconds["write"] += time.perf_counter() - before
    return done


def manifest(
    part: Part,
    entries: list[dict[str, Any]],
    drawn: Done,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    options: dict[str, Any],
    held_out: dict[str, Any] | None,
) -> dict[str, Any]:
    """The manifest of the shards `entries`; `tokenizer_name` is the tokenizer's file as seen from their folder."""
    rows = sum(entry["rows"] for entry in entries)
    return {
        "schema": 1,
        "seq_len": part.seq_len,
        "max_sequences": part.slots,
        "rows": rows,
        "block_rows": BLOCK_ROWS,
        "dtype": part.dtype,
        "tokenizer": {
            "kind": tokenizer.kind,
            "file": tokenizer_name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "special_ids": tokenizer.special_ids,
        },
        "statistics": statistics(drawn, rows, part.seq_len),
        "options": options,
        "shards": entries,
        "held_out": held_out,
        "order": 2,
    }


def statistics(drawn: Done, rows: int, seq_len: int) -> dict[str, Any]:
    """What a manifest says of its rows. For pairs, `tokens` - 3 `sequences` = corpus + borrowed - truncated tokens."""
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

"""What a dataset holds, for people: everything shown is counted from the rows or read from the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megabert import shards
from megabert.tokenizer import Tokenizer

BAR = 40
HISTOGRAM_ROWS = 1 << 16  # rows read for the histogram at most, spread over the dataset


def summary_text(s: dict[str, Any], output: str) -> str:
    """The end of a build in a dozen lines."""
    mb = 1e6
    random_next = "none" if s["random_next_share"] is None else f"{s['random_next_share']:.1%}"
    dropped = ", ".join(f"{name} {count}" for name, count in s["dropped"].items()) or "nothing"
    lines = [
        ("documents", f"{s['documents']:,} ({s['empty_documents']:,} more were empty)"),
        ("sentences", f"{s['sentences']:,}"),
        (
            "tokens",
            f"{s['tokens']:,} in rows, {s['corpus_tokens']:,} in the corpus, vocabulary {s['vocab_size']:,}",
        ),
        ("sequences", f"{s['sequences']:,}, random next {random_next}"),
        ("rows", f"{s['rows']:,} in {s['shards']} shards, fill {s['fill']:.2%}"),
        ("held out", f"{s['held_out_documents']:,} documents, {s['held_out_rows']:,} rows"),
        (
            "bytes",
            f"{s['shard_bytes'] / mb:,.1f} MB of shards, {s['shard_bytes'] / s['text_bytes']:.3f} of the text's",
        ),
        ("dropped", f"{dropped}; NUL bytes removed: {s['nuls_removed']}"),
        (
            "speed",
            f"{s['mb_per_second']:.2f} MB/s of text, {s['mb_per_second_per_worker']:.2f} MB/s a worker "
            f"({s['workers']} workers, {s['seconds']:.1f} s; tokenizer {s['tokenizer_seconds']:.1f} s)",
        ),
        ("memory", f"{s['peak_memory'] / mb:.0f} MB at most in one process"),
    ]
    return "\n".join([f"dataset    {output}", *(f"{name:10} {text}" for name, text in lines)])


def histogram(values: np.ndarray, top: int, bins: int = 16) -> list[str]:
    """Lines of a bar chart of `values` in 1..top."""
    edges = np.linspace(0, top, min(bins, top) + 1).astype(int)
    counts = np.histogram(values, bins=np.append(edges[:-1] + 1, top + 1))[0]
    most = max(1, int(counts.max()))
    return [
        f"{low + 1:5}-{high:<5} {count:>10,} {'█' * round(BAR * count / most)}"
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]


def inspect(folder: Path, samples: int, seed: int) -> str:
    """Counts, length histogram and decoded sample rows of the dataset in `folder`."""
    dataset = shards.Dataset(folder)
    m = dataset.manifest
    tokenizer = Tokenizer.load(folder / m.tokenizer["file"])
    rng = np.random.default_rng(seed)
    step = -(-m.rows // HISTOGRAM_ROWS)
    rows = dataset.read(np.arange(0, m.rows, step))
    lengths = rows.bounds[:, :, 0].astype(np.int64)
    used = lengths > 0
    lines = [
        f"dataset      {folder}",
        f"fingerprint  {m.fingerprint}",
        f"rows         {m.rows:,} of {m.seq_len} tokens, up to {m.max_sequences} sequences each, {len(m.shards)} shards",
        f"tokenizer    {m.tokenizer['file']}, {m.vocab_size:,} pieces, sha256 {m.tokenizer['sha256'][:16]}…",
        f"held out     {m.held_out['rows'] if m.held_out else 0:,} rows",
        *(f"{name.replace('_', ' '):12} {value}" for name, value in sorted(m.statistics.items())),
        f"counted      fill {lengths.sum() / lengths.size * m.max_sequences / m.seq_len:.4f}, "
        f"{used.sum(1).mean():.3f} sequences a row, over {len(lengths):,} rows",
        "",
        "tokens a sequence",
        *histogram(lengths[used], m.seq_len),
    ]
    chosen = np.sort(rng.choice(m.rows, min(samples, m.rows), replace=False))
    found = dataset.read(chosen)
    for i, row_id in enumerate(chosen):
        lines += ["", f"row {row_id}"]
        at = 0
        for slot in range(m.max_sequences):
            length, first = (int(v) for v in found.bounds[i, slot])
            if not length:
                break
            ids = found.ids[i, at : at + length]
            label = {0: "next", 1: "random next", -1: "no pair"}[int(found.isnext[i, slot])]
            lines.append(f"  sequence {slot}: {length} tokens, {label}")
            lines.append(f"    A: {tokenizer.decode(ids[1 : first - 1])}")
            if length > first:
                lines.append(f"    B: {tokenizer.decode(ids[first : length - 1])}")
            at += length
    return "\n".join(lines)

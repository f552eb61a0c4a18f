"""What a build did, for people, from its summary."""

from __future__ import annotations

from typing import Any


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

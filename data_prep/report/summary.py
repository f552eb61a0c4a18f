"""Figures of a build: what it read, kept and dropped, which must add up or the build fails.

Every figure is counted, none is a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadTask
from data_prep.executor.work_files import ItemResult, total
from data_prep.readers.documents import AMBIGUOUS, AMBIGUOUS_DOCUMENTS
from megabert.data.tokenizer import Tokenizer

MASKED = ("masked e-mail addresses", "masked IP addresses", "removed citation marks")
UNITS = ("documents", "sentences", "tokens")


def dataset_facts(manifest: dict[str, Any], drawn: ItemResult, held: ItemResult) -> dict[str, Any]:
    """Figures of one dataset and its held-out part."""
    held_out = manifest["held_out"]
    return manifest["statistics"] | {
        "rows": manifest["rows"],
        "max_sequences": manifest["max_sequences"],
        "shards": len(manifest["shards"]),
        "shard_bytes": sum(entry["bytes"] for entry in manifest["shards"]),
        "repeated": {unit: drawn.counts[f"repeated {unit}"] for unit in UNITS},
        "held_out": {
            "rows": held_out["rows"] if held_out else 0,
            "documents": held.counts["documents"],
            "sentences": held.counts["sentences"],
            "tokens": held.counts["corpus tokens"],
        },
        "lengths": dict(sorted(drawn.histograms["tokens of a sequence"].items())),
    }


def truncated_share(statistics: dict[str, Any]) -> float:
    """Share of the tokens of pairs, random second parts included, that was cut off."""
    whole = statistics["corpus_tokens"] + statistics["borrowed_tokens"]
    return statistics["truncated_tokens"] / whole if whole else 0.0


def by_corpus(corpora: Sequence[Corpus], tasks: Sequence[ReadTask], results: list[ItemResult]) -> dict[str, ItemResult]:
    """The sum of what reading the tasks of each corpus reported."""
    pairs = list(zip(tasks, results, strict=True))
    return {
        corpus.name: total([result for task, result in pairs if task.corpus == i]) for i, corpus in enumerate(corpora)
    }


def facts(
    account: dict[str, Any],
    corpora: Sequence[Corpus],
    tokenizer: Tokenizer,
    read: dict[str, ItemResult],
    everything: ItemResult,
    problems: Problems,
    datasets: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """All figures of a build but its times; asserts that documents read are those kept and dropped."""
    whole = {unit: sum(result.counts[f"{unit} read"] for result in read.values()) for unit in UNITS}
    dropped = {
        "documents": sum(everything.dropped.values()),
        "sentences": everything.counts["dropped sentences"],
        "tokens": everything.counts["dropped tokens"],
    }
    for length, dataset in datasets.items():
        for unit in UNITS:
            trained = dataset["corpus_tokens" if unit == "tokens" else unit]
            kept = trained - dataset["repeated"][unit] + dataset["held_out"][unit]
            assert whole[unit] == kept + dropped[unit], (
                f"{unit} do not add up for length {length}: {whole[unit]} read, {kept} kept, {dropped[unit]} dropped"
            )
    return {
        "options": account["options"],
        "tokenizer": {"kind": tokenizer.kind, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
        "files": {name: account["input files"][name] for name in ("count", "bytes")},
        "read": whole | {"bytes": sum(result.counts["bytes read"] for result in read.values())},
        "corpora": {
            corpus.name: {
                "weight": corpus.weight,
                **{unit: read[corpus.name].counts[f"{unit} read"] for unit in (*UNITS, "bytes")},
                "dropped_while_reading": dict(sorted(read[corpus.name].dropped.items())),
            }
            for corpus in corpora
        },
        "dropped": dropped
        | {
            "reasons": dict(sorted(everything.dropped.items())),
            "repeated_paragraphs": everything.counts["repeated paragraphs"],
        }
        | ({"lines": lines} if (lines := _lines(everything)) else {}),
        "cleaned": {name: everything.counts[name] for name in ("nuls", "control characters", "markup tags")}
        | {name: everything.counts[name] for name in MASKED if everything.counts[name]},
        "problems": dict(sorted((problems.counts + everything.problems).items())),
        "ambiguous": {"files": everything.counts[AMBIGUOUS], "documents": everything.counts[AMBIGUOUS_DOCUMENTS]},
        "examples": {name: texts for name, texts in sorted(everything.examples.items()) if texts},
        "histograms": {
            name: dict(sorted(everything.histograms[name].items()))
            for name in ("tokens of a document", "tokens of a sentence")
            if name in everything.histograms
        },
        "datasets": datasets,
    }


def _lines(everything: ItemResult) -> dict[str, int]:
    """Lines that rules of lines dropped, by rule."""
    mark = "lines: "
    return {
        name.removeprefix(mark): count for name, count in sorted(everything.counts.items()) if name.startswith(mark)
    }


def _speed(s: dict[str, Any]) -> str:
    if s["resumed"]:
        return f"resumed, {s['seconds']:.1f} s more ({s['workers']} workers)"
    return (
        f"{s['mb_per_second']:.2f} MB/s of text, {s['mb_per_second_per_worker']:.2f} MB/s a worker "
        f"({s['workers']} workers, {s['seconds']:.1f} s; tokenizer {s['tokenizer_seconds']:.1f} s)"
    )


def summary_text(s: dict[str, Any], folder: str) -> str:
    """The end of a build in a dozen lines."""
    mb = 1e6
    read, dropped = s["read"], s["dropped"]
    reasons = ", ".join(f"{name} {count:,}" for name, count in dropped["reasons"].items()) or "none"
    problems = ", ".join(f"{name} {count:,}" for name, count in s["problems"].items()) or "none"
    lines = [
        ("read", f"{read['documents']:,} documents, {read['sentences']:,} sentences, {read['tokens']:,} tokens, "
                 f"{read['bytes'] / mb:,.1f} MB of text in {s['files']['count']:,} files"),
        ("dropped", f"{dropped['documents']:,} documents ({reasons})"),
        ("problems", f"{problems}; NUL bytes removed: {s['cleaned']['nuls']:,}"),
        ("vocabulary", f"{s['tokenizer']['vocab_size']:,} tokens ({s['tokenizer']['kind']})"),
    ]  # fmt: skip
    if dropped["repeated_paragraphs"]:
        lines.insert(2, ("", f"{dropped['repeated_paragraphs']:,} repeated paragraphs"))
    if (ambiguous := s["ambiguous"])["files"]:
        text = (
            f"{ambiguous['files']:,} text files do not show what a document is: each was taken as one, cut every 8 MiB, "
            f"{ambiguous['documents']:,} in all; --text-documents blank-line or line if that is wrong"
        )
        lines.insert(1, ("documents", text))
    if dropped.get("lines"):
        lines.insert(2, ("", ", ".join(f"{count:,} lines ({name})" for name, count in dropped["lines"].items())))
    for length, d in s["datasets"].items():
        random_next = "none" if d["random_next_share"] is None else f"{d['random_next_share']:.1%}"
        lines += [
            (f"rows {length}", f"{d['rows']:,} in {d['shards']} shards, fill {d['fill']:.2%}, "
                               f"{d['sequences']:,} sequences, random next {random_next}, "
                               f"cut off {d['truncated_tokens']:,} tokens ({truncated_share(d):.1%})"),
            ("", f"{d['documents']:,} documents, {d['tokens']:,} tokens, {d['shard_bytes'] / mb:,.1f} MB, "
                 f"{d['shard_bytes'] / max(1, d['text_bytes']):.3f} of the text's bytes"),
            ("", f"held out: {d['held_out']['documents']:,} documents, {d['held_out']['rows']:,} rows"),
        ]  # fmt: skip
    lines += [
        ("speed", _speed(s)),
        ("memory", f"{s['peak_memory'] / mb:.0f} MB at most in one process"),
        ("report", f"{folder}/report.json"),
    ]  # fmt: skip
    return "\n".join([f"dataset    {folder}", *(f"{name:10} {text}" for name, text in lines)])

"""Figures of a build: what was read, kept and dropped; the build fails if they don't add up.

Every figure is counted independently, none is computed as a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.common.errors import Problems, counted, describe_losses
from data_prep.common.records import Corpus, ReadTask
from data_prep.executor.work_files import ItemResult, total
from data_prep.filters import rules
from data_prep.stages import dedup
from data_prep.stages.read import unknown
from data_prep.stages.write import WrittenSplit
from megabert.common.logs import log
from megabert.data.tokenizer import Tokenizer

UNITS = ("documents", "sentences", "tokens")
# prefix of the names of rules of lines among counts
LINES = "lines: "
# shares of [UNK] tokens, and of the characters in them, above which a build warns
MAX_UNKNOWN = 0.001


def describe_corpora(
    corpora: Sequence[Corpus], tasks: Sequence[ReadTask], results: list[ItemResult]
) -> dict[str, dict[str, Any]]:
    """Figures of reading for each corpus, by the results of its tasks; warns of one of which too much is [UNK]."""
    described = {}
    for i, corpus in enumerate(corpora):
        of_corpus = [(task, result) for task, result in zip(tasks, results, strict=True) if task.corpus == i]
        read = total([result for _, result in of_corpus])
        largest = [result.facts["largest"] for _, result in of_corpus if "largest" in result.facts]
        shares, unknown_of = unknown(read), Counter[str]()
        for _, result in of_corpus:
            unknown_of.update(dict(result.facts["most unknown"]))
        if max(shares["token_share"], shares["character_share"]) > MAX_UNKNOWN:
            most = "".join(f", the most in {path}" for path, _ in unknown_of.most_common(1))
            log.warning(
                f"{_unknown_text(shares)}{most}: the tokenizer lacks characters (give another --tokenizer, or train one with "
                "--character-coverage 1 or a larger --vocab-size)"
            )
        described[corpus.name] = {
            "weight": corpus.weight,
            "files": sum(not part.start for task, _ in of_corpus for part in task.ranges),
            **{unit: read.counts[f"{unit} read"] for unit in (*UNITS, "bytes")},
            "largest_document": max(largest, key=lambda document: document["bytes"], default=None),
            "unknown": shares,
            "dropped_while_reading": _sorted(read.dropped),
        }
    return described


def facts(
    account: dict[str, Any],
    tokenizer: Tokenizer,
    corpora: dict[str, dict[str, Any]],
    everything: ItemResult,
    problems: Problems,
    datasets: Mapping[int, Sequence[WrittenSplit]],
) -> dict[str, Any]:
    """All figures of a build except for times; asserts that documents read are those kept and dropped. `corpora`: as described;
    `problems`: those of the list of files."""
    counts = everything.counts
    read = {unit: counts[f"{unit} read"] for unit in (*UNITS, "bytes")}
    dropped = {"documents": everything.dropped.total()}
    dropped |= {unit: counts[f"dropped {unit}"] for unit in ("sentences", "tokens")}
    figures = {str(seq_len): _dataset_facts(splits) for seq_len, splits in datasets.items()}
    for length, dataset in figures.items():
        for unit in UNITS:
            trained = dataset["corpus_tokens" if unit == "tokens" else unit]
            kept = trained - dataset["repeated"][unit] + dataset["held_out"][unit]
            assert read[unit] == kept + dropped[unit], (
                f"{unit} do not add up for length {length}: {read[unit]} read, {kept} kept, {dropped[unit]} dropped"
            )
    whole = total([ItemResult.of(problems), everything])
    return {
        "options": account["options"],
        "tokenizer": {"kind": tokenizer.kind, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
        "files": {name: account["input files"][name] for name in ("count", "bytes")},
        "formats": _sorted(everything.formats),
        "read": read,
        "corpora": corpora,
        "unknown": unknown(everything),
        "dropped": dropped
        | {
            "reasons": _sorted(everything.dropped),
            "repeated_paragraphs": counts["repeated paragraphs"],
            "lines": {name.removeprefix(LINES): n for name, n in _sorted(counts).items() if name.startswith(LINES)},
        },
        "changed": _sorted(everything.changed),
        "problems": _sorted(+whole.problems),
        "lost": whole.lost,
        "datasets": figures,
    }


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def _dataset_facts(splits: Sequence[WrittenSplit]) -> dict[str, Any]:
    """Figures of one dataset and its held-out part, which is the first of two splits."""
    manifest, train = splits[-1].manifest, splits[-1].drawn.counts
    held, held_out = splits[0].drawn.counts if len(splits) > 1 else Counter[str](), manifest["held_out"] or {}
    return manifest["statistics"] | {
        "rows": manifest["rows"],
        "max_sequences": manifest["max_sequences"],
        "shards": len(manifest["shards"]),
        "shard_bytes": sum(entry["bytes"] for entry in manifest["shards"]),
        "repeated": {unit: train[f"repeated {unit}"] for unit in UNITS},
        "held_out": {
            "rows": held_out.get("rows", 0),
            "passages": held_out.get("passages", 0),
            "documents": held["documents"],
            "sentences": held["sentences"],
            "tokens": held["corpus tokens"],
        },
    }


def losses_text(read: ItemResult) -> str:
    """What was read and dropped, by reason and with the option of each, as the end of an error; "" if nothing was dropped."""
    lines = Counter({name: n for name, n in read.counts.items() if name.startswith(LINES)})
    reasons, problems = +(read.dropped + lines), +read.problems
    if not reasons and not problems:
        return ""
    dropped = ", ".join(f"{name} {n:,}{_find_option(name)}" for name, n in sorted(reasons.items())) or "none"
    options = "".join(sorted({_find_option(name) for name in problems}))
    return (
        f"; of {read.counts['documents read']:,} documents read were dropped: {dropped}; "
        f"problems: {describe_losses(problems, read.lost)}{options}"
    )


def _find_option(reason: str) -> str:
    """The option behind a reason for which documents or lines are dropped, in brackets; "" if there is none."""
    options = dict.fromkeys((*dedup.REASONS.values(), dedup.ONLY_REPEATED), "--dedup none") | {
        "left out by weight": "--weight", "null value": "--text-field", "no text field": "--text-field",
        "invalid UTF-8": "--encoding-errors replace", "lone surrogate": "--encoding-errors replace",
    }  # fmt: skip
    rule = reason.removeprefix(LINES)
    if rule in rules.BY_NAME:
        return f" (--filters … {rule}=off)"
    if reason.startswith("classifier "):
        return " (--classifier)"
    option = options.get(reason, "--filters" if ": " in reason else "")
    return option and f" ({option})"


def summary_text(s: dict[str, Any], folder: str) -> str:
    """The summary of a build in a dozen lines."""
    read, dropped, files = s["read"], s["dropped"], s["files"]["count"]
    speed = "resumed" if s["resumed"] else f"{s['mb_per_second']:.2f} MB/s of text"
    lines = {
        "dataset": folder,
        "read": f"{_list_counts(read, UNITS)}, {read['bytes'] / 1e6:,.1f} MB of text in {counted(files, 'files')}",
        "formats": _list_reasons(s["formats"]),
        "documents": "; ".join(_documents(name, corpus) for name, corpus in s["corpora"].items()),
        "dropped": f"{counted(dropped['documents'], 'documents')} ({_list_reasons(dropped['reasons'])}); "
        f"{counted(dropped['repeated_paragraphs'], 'repeated paragraphs')}; lines: {_list_reasons(dropped['lines'])}",
        "changed": f"dropped inside documents: {_list_reasons(s['changed'])}",
        "problems": describe_losses(s["problems"], s["lost"]),
        "vocabulary": f"{s['tokenizer']['vocab_size']:,} tokens ({s['tokenizer']['kind']})",
        "unknown": _unknown_text(s["unknown"]),
    }
    for length, d in s["datasets"].items():
        random_next = "none" if d["random_next_share"] is None else f"{d['random_next_share']:.1%}"
        held = d["held_out"]
        lines[f"rows {length}"] = (
            f"{d['rows']:,} in {counted(d['shards'], 'shards')}, fill {d['fill']:.2%}, "
            f"{counted(d['sequences'], 'sequences')}, random next {random_next}, "
            f"cut off {d['truncated_tokens']:,} tokens; {_list_counts(d, ('documents', 'tokens'))} with [CLS] and [SEP], "
            f"{d['shard_bytes'] / 1e6:,.1f} MB; "
            f"held out {_list_counts(held, ('passages' if held['passages'] else 'documents', 'rows'))}"
        )
    lines |= {
        "speed": f"{speed}, {s['seconds']:.1f} s by {counted(s['workers'], 'workers')}, "
        f"tokenizer {s['tokenizer_seconds']:.1f} s",
        "memory": f"{s['peak_memory'] / 1e6:.0f} MB at most in one process",
        "report": f"{folder}/report.json",
    }
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())


def _list_counts(counts: Mapping[str, int], names: Sequence[str]) -> str:
    return ", ".join(counted(counts[name], name) for name in names)


def _list_reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _documents(name: str, corpus: dict[str, Any]) -> str:
    """How the documents of a corpus are distributed."""
    share, largest = corpus["documents"] / max(corpus["files"], 1), corpus["largest_document"]
    size = f", the largest of {largest['bytes'] / 1e6:,.2f} MB in {largest['source']}" if largest else ""
    return f"{name}: {corpus['documents']:,}, {share:,.1f} a file{size}"


def _unknown_text(shares: dict[str, Any]) -> str:
    return ", ".join(
        f"{shares[f'{unit}s']:,} {of} ({shares[f'{unit}_share']:.2%})"
        for unit, of in (("token", "tokens are [UNK]"), ("character", "characters are in them"))
    )

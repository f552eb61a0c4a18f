"""Figures of a build: what was read, kept and dropped; the build fails if they don't add up.

Every figure is counted independently, none is computed as a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from data_prep.common.errors import Losses, Problems, add_losses, describe_losses
from data_prep.common.records import Corpus, ReadTask
from data_prep.executor.work_files import ItemResult, total
from data_prep.filters import rules
from data_prep.stages import dedup
from megabert.common.logs import log
from megabert.data.tokenizer import Tokenizer

UNITS = ("documents", "sentences", "tokens")
# prefix of the names of rules of lines among counts
LINES = "lines: "
# shares of [UNK] tokens, and of the characters in them, above which a build warns
MAX_UNKNOWN = 0.001


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
            "passages": held_out.get("passages", 0) if held_out else 0,
            "documents": held.counts["documents"],
            "sentences": held.counts["sentences"],
            "tokens": held.counts["corpus tokens"],
        },
    }


def by_corpus(corpora: Sequence[Corpus], tasks: Sequence[ReadTask], results: list[ItemResult]) -> dict[str, ItemResult]:
    """The sum of the results of reading the tasks of each corpus, with the facts "files", "largest", the largest document, and "most
    unknown", (file, characters in [UNK]) of at most one."""
    sums = {}
    for i, corpus in enumerate(corpora):
        of_corpus = [(task, result) for task, result in zip(tasks, results, strict=True) if task.corpus == i]
        sums[corpus.name] = total([result for _, result in of_corpus])
        largest = [result.facts["largest"] for _, result in of_corpus if "largest" in result.facts]
        unknown_of: Counter[str] = Counter()
        for _, result in of_corpus:
            unknown_of.update(dict(result.facts["most unknown"]))
        sums[corpus.name].facts = {
            "files": sum(not part.start for task, _ in of_corpus for part in task.ranges),
            "largest": max(largest, key=lambda document: document["bytes"], default=None),
            "most unknown": unknown_of.most_common(1),
        }
    return sums


def unknown(read: ItemResult) -> dict[str, Any]:
    """[UNK] tokens and the characters in them, and their shares of the documents that reading kept."""
    counts = {unit: read.counts[f"unknown {unit}s"] for unit in ("token", "character")}
    return {f"{unit}s": count for unit, count in counts.items()} | {
        f"{unit}_share": round(count / max(1, read.counts[f"kept {unit}s"]), 6) for unit, count in counts.items()
    }


def warn_unknown(read: dict[str, ItemResult]) -> None:
    """Warn of each corpus, as of `by_corpus`, of whose tokens or characters too many are [UNK]."""
    for result in read.values():
        shares = unknown(result)
        if max(shares["token_share"], shares["character_share"]) > MAX_UNKNOWN:
            most = "".join(f", most of them in {path}" for path, _ in result.facts["most unknown"])
            log.warning(
                f"{unknown_text(shares)}{most}: the tokenizer lacks characters (give another --tokenizer, or train one with "
                "--character-coverage 1 or a larger --vocab-size)"
            )


def unknown_text(shares: dict[str, Any]) -> str:
    return ", ".join(
        f"{shares[f'{unit}s']:,} {of} ({shares[f'{unit}_share']:.2%})"
        for unit, of in (("token", "tokens are [UNK]"), ("character", "characters are in them"))
    )


def facts(
    account: dict[str, Any],
    corpora: Sequence[Corpus],
    tokenizer: Tokenizer,
    read: dict[str, ItemResult],
    everything: ItemResult,
    problems: Problems,
    datasets: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """All figures of a build except for times; asserts that documents read are those kept and dropped."""
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
    lost: Losses = {}
    for losses in (problems.lost, everything.lost):
        add_losses(lost, losses)
    return {
        "options": account["options"],
        "tokenizer": {"kind": tokenizer.kind, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
        "files": {name: account["input files"][name] for name in ("count", "bytes")},
        "read": whole | {"bytes": sum(result.counts["bytes read"] for result in read.values())},
        "corpora": {
            corpus.name: {
                "weight": corpus.weight,
                "files": read[corpus.name].facts["files"],
                **{unit: read[corpus.name].counts[f"{unit} read"] for unit in (*UNITS, "bytes")},
                "largest_document": read[corpus.name].facts["largest"],
                "unknown": unknown(read[corpus.name]),
                "dropped_while_reading": dict(sorted(read[corpus.name].dropped.items())),
            }
            for corpus in corpora
        },
        "unknown": unknown(total([*read.values()])),
        "dropped": dropped
        | {
            "reasons": dict(sorted(everything.dropped.items())),
            "repeated_paragraphs": everything.counts["repeated paragraphs"],
            "lines": {name[len(LINES) :]: n for name, n in sorted(everything.counts.items()) if name.startswith(LINES)},
        },
        "changed": dict(sorted(everything.changed.items())),
        "problems": dict(sorted((problems.counts + everything.problems).items())),
        "lost": lost,
        "datasets": datasets,
    }


def _documents(name: str, corpus: dict[str, Any]) -> str:
    """How the documents of a corpus are distributed."""
    share, largest = corpus["documents"] / max(corpus["files"], 1), corpus["largest_document"]
    size = f", the largest of {largest['bytes'] / 1e6:,.2f} MB in {largest['source']}" if largest else ""
    return f"{name}: {corpus['documents']:,}, {share:,.1f} a file{size}"


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
    options = dict.fromkeys((*dedup.REASONS.values(), dedup.LOST), "--dedup none") | {
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
    mb = 1e6
    read, dropped = s["read"], s["dropped"]
    reasons, changed, cut_lines = (
        ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
        for counts in (dropped["reasons"], s["changed"], dropped["lines"])
    )
    speed = "resumed, " if s["resumed"] else f"{s['mb_per_second']:.2f} MB/s of text, "
    lines = {
        "dataset": folder,
        "read": f"{read['documents']:,} documents, {read['sentences']:,} sentences, {read['tokens']:,} tokens, "
        f"{read['bytes'] / mb:,.1f} MB of text in {s['files']['count']:,} files",
        "documents": "; ".join(_documents(name, corpus) for name, corpus in s["corpora"].items()),
        "dropped": f"{dropped['documents']:,} documents ({reasons}); {dropped['repeated_paragraphs']:,} repeated paragraphs; "
        f"lines: {cut_lines}",
        "changed": f"dropped inside documents: {changed}",
        "problems": describe_losses(s["problems"], s["lost"]),
        "vocabulary": f"{s['tokenizer']['vocab_size']:,} tokens ({s['tokenizer']['kind']})",
        "unknown": unknown_text(s["unknown"]),
    }
    for length, d in s["datasets"].items():
        random_next = "none" if d["random_next_share"] is None else f"{d['random_next_share']:.1%}"
        held = d["held_out"]
        what = f"{held['passages']:,} passages" if held["passages"] else f"{held['documents']:,} documents"
        lines[f"rows {length}"] = (
            f"{d['rows']:,} in {d['shards']} shards, fill {d['fill']:.2%}, {d['sequences']:,} sequences, random next {random_next}, "
            f"cut off {d['truncated_tokens']:,} tokens; {d['documents']:,} documents, {d['tokens']:,} tokens, "
            f"{d['shard_bytes'] / mb:,.1f} MB; held out {what}, {held['rows']:,} rows"
        )
    lines |= {
        "speed": f"{speed}{s['seconds']:.1f} s by {s['workers']} workers, tokenizer {s['tokenizer_seconds']:.1f} s",
        "memory": f"{s['peak_memory'] / mb:.0f} MB at most in one process",
        "report": f"{folder}/report.json",
    }
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())

"""Sections of the page besides the curves: samples, events, data, results of fine-tuning, configuration, environment."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megabert.commands.report.run_folder import Data, Run, defaults
from megabert.commands.report.tables import Markup, bars, folded, number, table
from megabert.common.text import duration

EVENTS = 200  # of a run that are listed
TIMES = ("start", "middle", "end")


def several(runs: Sequence[Run], of_run: Any) -> str:
    """`of_run(run)` of each run, under its name where there are several."""
    heads = [f"<h3>{html.escape(run.name)}</h3>" if len(runs) > 1 else "" for run in runs]
    return "".join(head + of_run(run) for head, run in zip(heads, runs, strict=True))


# ---- overview


def overview(run: Run) -> list[tuple[str, str]]:
    """What a run came to, as pairs of a name and a text."""
    last, found = run.metrics.last, []
    total = run.total_steps
    share = f"{run.metrics.step:,} of {total:,}" if total else f"{run.metrics.step:,}"
    found.append(("updates", share))

    def add(name: str, key: str, written: Any) -> None:
        value = last.get(key)
        if isinstance(value, int | float):
            found.append((name, written(value)))

    add("held-out loss", "eval/mlm_loss", lambda v: f"{v:.4f} nats")
    add("held-out accuracy", "eval/mlm_accuracy", lambda v: f"{v:.2%}")
    add("next sentence, held out", "eval/nsp_accuracy", lambda v: f"{v:.2%}")
    add("trained for", "time/train_seconds", duration)
    add("throughput, last", "perf/tokens_per_sec", lambda v: f"{v:,.0f} tokens/s")
    add("MFU, last", "perf/mfu", lambda v: f"{v:.1%}")
    add("memory of a rank", "perf/peak_memory_gib", lambda v: f"{v:.2f} GiB")
    add("rows seen", "data/cursor", lambda v: f"{v * run.settings.get('batch.global_size', 0):,}")
    restarts = sum(event.kind == "restart" for event in run.events)
    found.append(("restarts", f"{restarts:,}" if run.starts else "not recorded"))
    return found


def tiles(run: Run) -> str:
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in overview(run)
    )
    return f'<dl class="tiles">{cells}</dl>'


def compared(runs: Sequence[Run]) -> str:
    """The runs' overviews side by side."""
    columns = [dict(overview(run)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, "—") for column in columns)) for name in names]
    return table(("", *_heads(runs)), rows, "What the runs came to", range(1, len(runs) + 1))


def _heads(runs: Sequence[Run]) -> list[Markup]:
    return [Markup(f'<span class="c{i}">{i + 1}</span> {html.escape(run.name)}') for i, run in enumerate(runs)]


def missing(runs: Sequence[Run]) -> str:
    """What the report would have and cannot have."""
    lines = [f"{run.name}: {text}" if len(runs) > 1 else text for run in runs for text in run.missing]
    if not lines:
        return ""
    return f'<div class="missing"><ul>{"".join(f"<li>{html.escape(line)}</li>" for line in lines)}</ul></div>'


# ---- samples


def samples(run: Run) -> str:
    """The held-out samples: each text with its masks, and what the model said for each at up to three times."""
    if not run.samples:
        return "<p>None were recorded.</p>"
    names = TIMES if len(run.samples) == 3 else (TIMES[0], TIMES[2])[-len(run.samples) :]
    heads = [f"{name}, update {line['step']:,}" for name, line in zip(names, run.samples, strict=True)]
    parts = []
    for sample in run.samples[-1]["samples"]:
        said = [_same(line["samples"], sample) for line in run.samples]
        rows = []
        for place, mask in enumerate(sample["masks"], 1):
            truth = sample["tokens"][mask["at"]]
            answers = [_answer(masks.get(mask["at"]), truth) for masks in said]
            hidden = Markup(f'<span class="piece">{html.escape(_shown(truth))}</span>')
            rows.append((str(place), hidden, *answers))
        right = [sum(_is_right(masks.get(m["at"]), sample) for m in sample["masks"]) for masks in said]
        rows.append(("", "right", *(f"{count} of {len(sample['masks'])}" for count in right)))
        caption = f"Row {sample['row']:,} of the held-out split: what was hidden and what the model said"
        parts.append(f'<p class="sample">{_text(sample)}</p>')
        parts.append(table(("mask", "hidden", *heads), rows, caption))
    return "".join(parts)


def _same(samples: Sequence[dict[str, Any]], sample: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The masks by their places of the sample with the same text; {} where there is none."""
    found = next((s for s in samples if s["row"] == sample["row"] and s["tokens"] == sample["tokens"]), None)
    return {mask["at"]: mask | {"truth": found["tokens"][mask["at"]]} for mask in found["masks"]} if found else {}


def _is_right(mask: dict[str, Any] | None, sample: dict[str, Any]) -> bool:
    return bool(mask and mask["said"][0][0] == sample["tokens"][mask["at"]])


def _answer(mask: dict[str, Any] | None, truth: str) -> Markup:
    """The likeliest piece with a sign of whether it is right, and the next ones."""
    if mask is None:
        return Markup("—")
    (best, probability), *others = mask["said"]
    kind, sign = ("right", "✓") if best == truth else ("wrong", "✗")
    more = ", ".join(f"{_shown(piece)} {_rounded(p)}" for piece, p in others)
    return Markup(
        f'<span class="{kind}">{sign} {html.escape(_shown(best))}</span> {html.escape(_rounded(probability))}'
        f'<br><span class="quiet">{html.escape(more)}</span>'
    )


def _rounded(probability: float) -> str:
    return f"{probability:.0%}" if probability >= 0.01 else "<1%"


def _shown(piece: str) -> str:
    """A piece as it is read: its space before is left out, what cannot be seen is named."""
    plain = piece.strip()
    return plain if plain and plain.isprintable() else ascii(piece)


def _text(sample: dict[str, Any]) -> str:
    """A sample's text with its masks numbered; a mask shows what stood in the input."""
    parts = [html.escape(token) for token in sample["tokens"]]
    for place, mask in enumerate(sample["masks"], 1):
        truth = sample["tokens"][mask["at"]]
        blank = " " if truth.startswith(" ") else ""
        shown = _shown(mask["shown"]) if mask["shown"] else "…"
        parts[mask["at"]] = f"{blank}<mark>{html.escape(shown)}<sub>{place}</sub></mark>"
    return "".join(parts).strip()


# ---- events


def events(run: Run) -> str:
    """What happened to a run, and how often."""
    if not run.events:
        return "<p>None were recorded.</p>"
    counts = Counter(event.kind for event in run.events)
    said = ", ".join(f"{kind}: {count:,}" for kind, count in counts.items())
    rows = [(event.step, event.kind, event.text) for event in run.events[:EVENTS]]
    more = len(run.events) - len(rows)
    note = f"<p>{more:,} more are in the files of the run.</p>" if more else ""
    return table(("update", "event", "more"), rows, said, (0,)) + note


# ---- data


def data(runs: Sequence[Run]) -> str:
    """The datasets of the runs as their builds reported them, those that several have in common once."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr([(d.folder, d.name, d.share) for d in run.data]), []).append(run)
    parts = []
    for group in groups.values():
        names = ", ".join(run.name for run in group)
        head = f"<h3>{html.escape(names)}</h3>" if len(runs) > 1 else ""
        parts.append(head + "".join(map(_dataset, group[0].data)))
    return "".join(parts)


def _dataset(found: Data) -> str:
    title = f"<p><code>{html.escape(str(found.folder or found.name))}</code> {html.escape(found.share)}</p>"
    if found.folder is None:
        return f"{title}<p>It is not there.</p>"
    m, report = found.manifest, found.report
    held_out = m.get("held_out") or {}
    rows = [
        ("rows", m.get("rows")),
        ("tokens of a row, at most", m.get("seq_len")),
        ("tokens, without padding", m.get("statistics", {}).get("tokens")),
        ("filled positions", _percent(m.get("statistics", {}).get("fill"))),
        ("held-out rows", held_out.get("rows", 0)),
        (
            f"pieces of the vocabulary, {m.get('tokenizer', {}).get('kind', '')}",
            m.get("tokenizer", {}).get("vocab_size"),
        ),
    ]
    known = [row for row in rows if row[1] is not None]
    seal = f'<p class="quiet">fingerprint <code>{html.escape(str(m.get("fingerprint", "")))}</code></p>'
    parts = [title, seal, table(("figure", "value"), known, "Rows", (1,))]
    if corpora := report.get("corpora"):
        keys = ("weight", "documents", "sentences", "tokens", "bytes")
        body = [(name, *(c.get(key) for key in keys)) for name, c in corpora.items()]
        parts.append(table(("corpus", *keys), body, "Read", range(1, 6)))
    if reasons := report.get("dropped", {}).get("reasons"):
        parts.append(table(("reason", "documents"), list(reasons.items()), "Dropped", (1,)))
    if problems := report.get("problems"):
        parts.append(table(("problem", "times"), list(problems.items()), "Problems skipped", (1,)))
    lengths = report.get("datasets", {}).get(str(m.get("seq_len")), {}).get("lengths")
    if lengths:
        parts.append(bars({int(k): v for k, v in lengths.items()}, "Sequences by their tokens"))
    return "".join(parts)


def _percent(value: Any) -> str | None:
    return f"{value:.2%}" if isinstance(value, int | float) else None


# ---- fine-tuning


def finetuned(run: Run) -> str:
    """Results of fine-tuning that name the run: the best settings of each output by dev."""
    if not run.finetuned:
        return "<p>None found beside the run that name it; others are named with --finetuned.</p>"
    rows = []
    for folder, summary in run.finetuned:
        for point in summary["points"][:1]:
            task = summary.get("settings", {}).get("task", "")
            values = ", ".join(f"{k} {number(v)}" for k, v in point.get("point", {}).items())
            for split, figures in point["scores"].items():
                for name, figure in figures.items():
                    spread = f"{figure['mean']:.4f} ± {figure['std']:.4f}"
                    rows.append((task, split, name, spread, point.get("runs", 1), values, folder.name))
    head = ("task", "split", "metric", "mean ± deviation", "runs", "settings", "output")
    caption = "Best settings by the dev set, over seeds; the best epoch is chosen by dev too"
    return table(head, rows, caption, (3, 4))


# ---- configuration and environment


def configuration(runs: Sequence[Run]) -> str:
    """Settings: of one run those that are not the defaults and then the others, of several those that differ first."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    usual = defaults()
    if len(runs) > 1:
        first = [n for n in names if len({repr(run.settings.get(n)) for run in runs}) > 1]
        said, otherwise = "Settings that differ", "The settings that are the same"
    else:
        first = [n for n in names if n not in usual or runs[0].settings[n] != usual[n]]
        said, otherwise = "Settings that are not the defaults", "The settings that are the defaults"
    rest = [n for n in names if n not in set(first)]
    heads = _heads(runs) if len(runs) > 1 else ["value"]

    def rows(chosen: Sequence[str]) -> list[list[Any]]:
        return [
            [Markup(f"<code>{html.escape(n)}</code>"), *(_setting(r.settings.get(n)) for r in runs)] for n in chosen
        ]

    return table(("setting", *heads), rows(first), said) + folded(
        otherwise, table(("setting", *heads), rows(rest), otherwise)
    )


def _setting(value: Any) -> str:
    """A value as a configuration has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def environment(runs: Sequence[Run]) -> str:
    """What the runs ran on and with, as their last starts found it."""
    columns = [_environment(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, "—") for column in columns)) for name in names]
    heads = _heads(runs) if len(runs) > 1 else ["value"]
    return table(("what", *heads), rows, "As the last start found it")


def _environment(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if run.starts:
        last = run.starts[-1]
        found |= {"ranks": last.get("ranks"), "device of rank 0": last.get("device")}
        found |= {"cores": last.get("cores"), "memory": f"{number(last.get('memory_gib'))} GiB"}
        found["started"] = last.get("time")
    p = run.provenance
    found |= {f"backend of {role}": name for role, name in p.get("backends", {}).items()}
    found |= p.get("versions", {})
    found |= {"revision": p.get("revision"), "command": Markup(f"<code>{html.escape(p.get('command', ''))}</code>")}
    return found

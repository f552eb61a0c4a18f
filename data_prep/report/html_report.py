"""Report of a build as one HTML page without scripts: everything on it is a figure of `summary.facts`."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums } blockquote { margin: .3rem 0 .3rem 1rem; color: #555 }
.bar { display: inline-block; height: .7rem; background: #4a7ab5 }
"""


def _table(rows: Sequence[Sequence[Any]], head: Sequence[str] = ()) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            return f'<td class="n">{value:,}</td>'
        return f"<td>{html.escape(str(value))}</td>"

    lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"] if head else []
    lines += ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
    return "<table>" + "".join(lines) + "</table>"


def _bars(grouped: dict[tuple[int, int], int]) -> str:
    """A bar a group of values: (first, last) -> count."""
    most = max(grouped.values(), default=0)
    rows = []
    for (first, last), count in sorted(grouped.items()):
        label = f"{first:,} – {last:,}" if last > first else f"{first:,}"
        bar = f'<span class="bar" style="width:{300 * count / most:.0f}px"></span>'
        rows.append(f'<tr><td class="n">{label}</td><td class="n">{count:,}</td><td>{bar}</td></tr>')
    return "<table>" + "".join(rows) + "</table>"


def _by_doubling(counts: dict[int, int]) -> str:
    """A bar a power of two."""
    grouped: Counter[tuple[int, int]] = Counter()
    for value, count in counts.items():
        first = 1 << max(value, 1).bit_length() - 1
        grouped[first, 2 * first - 1] += count
    return _bars(grouped)


def _by_width(counts: dict[int, int], bars: int = 16) -> str:
    """Some bars of equal width from 1 to the largest value."""
    width = -(-max(counts, default=1) // bars)
    grouped: Counter[tuple[int, int]] = Counter()
    for value, count in counts.items():
        first = (value - 1) // width * width + 1
        grouped[first, first + width - 1] += count
    return _bars(grouped)


def render(s: dict[str, Any]) -> str:
    """The figures of `facts` as one HTML page without scripts."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>MegaBERT data report</title>",
        f"<style>{STYLE}</style><h1>Data report</h1>",
        "<h2>Read</h2>",
        _table(
            [
                (name, c["weight"], c["documents"], c["sentences"], c["tokens"], c["bytes"])
                for name, c in s["corpora"].items()
            ],
            ("corpus", "weight", "documents", "sentences", "tokens", "bytes"),
        ),
        "<h2>Dropped</h2>",
        _table(list(s["dropped"]["reasons"].items()), ("reason", "documents")),
        f"<p>{s['dropped']['repeated_paragraphs']:,} repeated paragraphs.</p>",
    ]
    if "without_url" in s["dropped"]:
        parts.append(f"<p>{s['dropped']['without_url']:,} documents have no URL and stayed.</p>")
    if cut := s["dropped"].get("repeated_substrings"):
        parts.append(f"<p>{cut:,} repeated substrings of {s['dropped']['words_of_substrings']:,} words.</p>")
    for reason, texts in s["examples"].items():
        quotes = "".join(f"<blockquote>{html.escape(text)}</blockquote>" for text in texts)
        parts.append(f"<h3>{html.escape(reason)}</h3>{quotes}")
    parts += ["<h2>Problems skipped</h2>", _table(list(s["problems"].items())), "<h2>Cleaned away</h2>"]
    parts.append(_table(list(s["cleaned"].items())))
    for name, counts in s["histograms"].items():
        parts.append(f"<h2>{html.escape(name.capitalize())}</h2>" + _by_doubling(counts))
    for length, d in s["datasets"].items():
        shown = {k: v for k, v in d.items() if not isinstance(v, dict)} | {
            f"held out {k}": v for k, v in d["held_out"].items()
        }
        parts.append(f"<h2>Rows of {length} tokens</h2>")
        parts.append(_table([(name.replace("_", " "), value) for name, value in shown.items()]))
        parts.append("<h3>Tokens of a sequence</h3>" + _by_width(d["lengths"]))
    return "\n".join(parts) + "\n"

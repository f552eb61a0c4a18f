"""Parts of the page in HTML: tables that scroll in themselves, numbers as people write them, texts that cannot be markup."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any


class Markup(str):
    """A text that is HTML already; every other one is escaped."""


def text(value: Any) -> str:
    """A value as HTML: numbers with separators, everything else escaped."""
    return value if isinstance(value, Markup) else html.escape(number(value))


def number(value: Any) -> str:
    """A value as people write it: 12,345 and 0.0123."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 and value.is_integer() else f"{value:.6g}"
    return "" if value is None else str(value)


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]], caption: str, numbers: Sequence[int] = ()) -> str:
    """A table whose first column names the row; columns `numbers` are aligned to the right. `caption` is for readers of any
    kind. A wide one scrolls in itself, also by the keyboard."""

    def cell(tag: str, column: int, value: Any, more: str = "") -> str:
        kind = ' class="n"' if column in numbers else ' class="wrap"' if tag == "td" and not more else ""
        return f"<{tag}{kind}{more}>{text(value)}</{tag}>"

    top = "".join(cell("th", column, value, ' scope="col"') for column, value in enumerate(head))
    body = "".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", column, value) for column, value in enumerate(row[1:], 1))
        + "</tr>"
        for row in rows
    )
    label = html.escape(caption)
    return (
        f'<div class="table"><p class="quiet">{label}</p><div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def folded(title: str, content: str) -> str:
    """Content that is shown when it is asked for, and on paper."""
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def section(anchor: str, title: str, content: str) -> str:
    return f'<section><h2 id="{anchor}">{html.escape(title)}</h2>{content}</section>'


def bars(counts: dict[int, int], caption: str, most_bars: int = 16) -> str:
    """A histogram as a table: a bar for each of at most `most_bars` stretches of equal width."""
    width = -(-(max(counts) + 1) // most_bars)
    grouped: dict[int, int] = {}
    for value, count in counts.items():
        grouped[value // width] = grouped.get(value // width, 0) + count
    largest = max(grouped.values())
    rows = []
    for stretch in range(max(grouped) + 1):
        first, count = stretch * width, grouped.get(stretch, 0)
        label = f"{first:,}" if width == 1 else f"{first:,} – {first + width - 1:,}"
        share = f"{100 * count / largest:.1f}%" if count else "0"
        bar = f'<span class="bar" style="width:{share}"></span>' if count else ""
        rows.append(f'<tr><th scope="row">{label}</th><td class="n">{count:,}</td><td>{bar}</td></tr>')
    return f'<table class="bars"><caption>{html.escape(caption)}</caption>{"".join(rows)}</table>'

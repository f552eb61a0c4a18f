"""The page: everything in one HTML file, without scripts and without anything that would be fetched."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megabert import __version__
from megabert.commands.report import curves, sections
from megabert.commands.report.run_folder import Run
from megabert.commands.report.style import STYLE
from megabert.commands.report.tables import section

OURS = "<!doctype html><!-- megabert report -->"  # how a report begins
NOTHING_ELSE = "default-src 'none'; style-src 'unsafe-inline'"  # what a browser may load


def render(runs: Sequence[Run], made: str) -> str:
    """The report of one run or of several over each other; `made` says when it was made."""
    title = "Training report: " + ", ".join(run.name for run in runs)
    parts = [
        ("curves", "Curves", curves.section(runs)),
        ("samples", "Held-out samples", sections.several(runs, sections.samples)),
        ("events", "Events", sections.several(runs, sections.events)),
        ("data", "Data", sections.data(runs)),
        ("finetuned", "Fine-tuning", sections.several(runs, sections.finetuned)),
        ("configuration", "Configuration", sections.configuration(runs)),
        ("environment", "Environment", sections.environment(runs)),
    ]
    links = "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name, _ in parts)
    places = "".join(f"<p class=quiet><code>{html.escape(str(run.folder.resolve()))}</code></p>" for run in runs)
    return (
        "\n".join(
            [
                OURS,
                '<html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f'<meta http-equiv="Content-Security-Policy" content="{NOTHING_ELSE}">',
                f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
                f"<header><h1>{html.escape(title)}</h1>{places}",
                sections.tiles(runs[0]) if len(runs) == 1 else sections.compared(runs),
                sections.missing(runs),
                f'<nav aria-label="Sections">{links}</nav></header><main>',
                *(section(*part) for part in parts),
                f'</main><footer class="quiet"><p>MegaBERT {__version__}, {html.escape(made)}</p></footer></body></html>',
            ]
        )
        + "\n"
    )

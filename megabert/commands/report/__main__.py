"""One HTML file about a run: curves, events, held-out samples, data, results, configuration, environment; or several runs
over each other.

megabert report RUN                       writes RUN/report.html
megabert report RUN1 RUN2 --output FILE   both in the same charts

The file refers to nothing outside itself. A run that is still training has a report too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megabert.commands.report import page, run_folder
from megabert.commands.report.charts import SHAPES
from megabert.common.arguments import Parser, called_as
from megabert.common.atomic_io import write_whole
from megabert.common.errors import OK, code_of, command
from megabert.common.logs import log

OUTPUT = "report.html"


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.commands.report"), description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folder written by megabert train")
    add("--output", default="", metavar="FILE", help=f"the file to write (default: {OUTPUT} in the first RUN)")
    add("--data", default="", metavar="DIR", help="the run's dataset, where it is no longer in its place")
    add(
        "--finetuned",
        action="append",
        default=[],
        metavar="DIR",
        help="output of megabert finetune to list, besides those found beside the run; several times",
    )
    args = parser.parse_args(argv)
    folders = [Path(name) for name in args.runs]
    check(folders, args.data, args.finetuned)
    output = place(folders[0], args.output)
    data = Path(args.data) if args.data else None
    finetuned = [Path(name) for name in args.finetuned]
    names = run_folder.names(folders)
    runs = [run_folder.read(*run, data, finetuned) for run in zip(folders, names, strict=True)]
    made = time.strftime("made %Y-%m-%d %H:%M UTC", time.gmtime())
    write_whole(output, page.render(runs, made).encode())
    for run in runs:
        for text in run.missing:
            log.info(f"{run.name}: {text}")
    log.info(f"{output}: {output.stat().st_size / 1e3:,.0f} kB")
    return OK


def check(folders: list[Path], data: str, finetuned: list[str]) -> None:
    """Raises ValueError for runs that cannot be shown together and options that belong to one of several."""
    if len(folders) > len(SHAPES):
        raise ValueError(f"{len(folders)} runs: at most {len(SHAPES)} can be told apart in one chart; name fewer")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("a run is named twice; name each once")
    if len(folders) > 1 and (data or finetuned):
        raise ValueError("--data and --finetuned are of one run; report it alone")


def place(first: Path, output: str) -> Path:
    """The file to write. Raises ValueError where it is a folder, or a file that is no report."""
    path = Path(output) if output else first / OUTPUT
    if path.is_dir():
        raise ValueError(f"--output {path}: is a folder; name a file in it")
    if output and not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}")
    if path.is_file():
        with open(path, "rb") as file:
            if file.read(len(page.OURS)) != page.OURS.encode():
                raise ValueError(f"{path}: is there and is no report; name another file with --output")
    return path


if __name__ == "__main__":
    sys.exit(code_of(main))

"""The commands `build`, `verify`, `inspect` and `push`: arguments and implementation."""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import PYDOC, Corpus
from data_prep.filters import rules
from data_prep.options import BuildOptions
from data_prep.readers import files
from megabert.common import storage
from megabert.common.arguments import Parser, called_as
from megabert.common.environment import cores, launched
from megabert.common.errors import OK, exit_on_ctrl_c
from megabert.common.files import add_path_when_full
from megabert.common.logs import hide_secrets, log

if TYPE_CHECKING:
    from megabert.data.tokenizer import Tokenizer


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; `description` precedes their list."""
    top = Parser(prog=called_as("data_prep"), description=description)
    commands = top.add_subparsers(dest="command", required=True, help="each has its --help")
    rules_of = "rules of --filters:\n" + rules.describe_rules()
    _add_build(commands.add_parser("build", help="text to shards", epilog=rules_of))
    p = commands.add_parser("verify", help="check every byte")
    p.add_argument("folder", metavar="DIR", help="what build wrote")
    p.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores)")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p = commands.add_parser("inspect", help="show its content")
    p.add_argument("folder", metavar="DIR", help="what build wrote")
    p.add_argument("--rows", type=int, default=3, metavar="N", help="sample rows to decode")
    p.add_argument("--masking", choices=("token", "word", "span"), default="token", help="of the sample rows")
    p = commands.add_parser("push", help="upload to the Hugging Face hub")
    p.add_argument("folder", metavar="DATASET", help="what build wrote, or a URL of it")
    p.add_argument("name", metavar="OWNER/NAME",
        help="dataset of the hub, made if missing, with the token of `hf auth login`, or HF_TOKEN; then --data hf://datasets/OWNER/NAME")  # fmt: skip
    p.add_argument("--private", action="store_true", help="only its owner sees it")
    return top


def _add_build(p: argparse.ArgumentParser) -> None:
    add = p.add_argument
    add("--input", nargs="+", required=True, metavar="[NAME=]PATH",
        help="files, folders or globs (MediaWiki XML dumps, WikiExtractor output, text, JSON lines and arrays, CSV, TSV, WET, each also "
        ".gz .bz2 .xz .zst; Parquet, Arrow, zip, tar), or the word pydoc (this machine's documentation); NAME= starts a corpus of that "
        "name")  # fmt: skip
    add("--output", required=True, metavar="DIR",
        help="folder of the dataset, or a URL: built in ~/.cache/megabert/builds, shards uploaded as they are written")  # fmt: skip
    add("--weight", nargs="+", default=[], metavar="NAME=W",
        help="repetitions of a corpus: 2 is every document twice, 0.5 half of them")  # fmt: skip
    add("--tokenizer", metavar="FILE", help="tokenizer.model, vocab.txt or tokenizer.json instead of a new one")
    add("--workers", type=int, metavar="N", help="processes (default: the cores, with ray all CPUs of the cluster)")
    add("--executor", choices=("local", "mpi", "ray"),
        help="processes of this machine, the ranks that mpirun or srun started, or tasks on a running Ray cluster (that of this machine "
        "or of RAY_ADDRESS), whose nodes share input and output (default: mpi under mpirun or srun, else local)")  # fmt: skip
    add("--on-error", choices=("stop", "skip"), default="stop",
        help="bad input: stop, or drop its line or record; places, bytes and files are counted")  # fmt: skip
    add("--overwrite", action="store_true",
        help="replace the dataset in DIR; an unfinished build with the same options is resumed")  # fmt: skip
    add("--part", metavar="K/N",
        help="read one of N parts of the input, as one of N independent jobs; then the command without it does the rest")  # fmt: skip
    add("--json", metavar="FILE", help="also write the summary to FILE, or the report of an already complete dataset")
    add("--quiet", action="store_true", help="no progress bar")
    BuildOptions.add_to(p)


def run(args: argparse.Namespace) -> int:
    """Run the parsed command; returns the exit code."""
    if args.command == "build":
        return _build(args)
    if args.command == "push":
        with exit_on_ctrl_c():
            from data_prep.push import push
        push(args.folder, args.name, args.private)
        return OK
    with exit_on_ctrl_c():  # slow imports, not needed by --help
        from data_prep.executor import pool
        from data_prep.report import inspect_dataset
        from megabert.data import shards

    pool.collect_garbage_rarely()
    if args.command == "inspect":
        print(inspect_dataset.inspect(args.folder, args.rows, args.masking))
        return OK
    problems = 0
    for problem in inspect_dataset.verify(args.folder, _workers(args) or cores(), not args.quiet):
        print(hide_secrets(problem))
        problems += 1
    for folder in inspect_dataset.datasets(args.folder) if not problems else ():
        print(f"{storage.public(str(folder))}: complete, {shards.Manifest.load(folder).rows} rows")
    return 1 if problems else OK


def _build(args: argparse.Namespace) -> int:
    if args.json:
        target = Path(args.json).absolute()
        if not target.parent.is_dir():
            raise BadInput(f"--json {args.json}: its folder does not exist; create it first")
        if target.is_dir() or target.resolve().is_relative_to(Path(args.output).resolve()):
            raise BadInput(
                f"--json {args.json}: is a folder, or in --output, which has the build's files alone; name another file"
            )
    part, options, given = _part(args), BuildOptions.of(args), corpora(args.input, args.weight)
    if not launched():
        for path in chain.from_iterable(corpus.paths for corpus in given):
            if path != PYDOC and not files.MAGIC.search(path):
                files.matches(path, Problems("stop"))
    with exit_on_ctrl_c():  # slow imports, after the check of options
        from data_prep.build import BuildPlan, build, build_part
        from data_prep.executor import output_folder, pool, ray_cluster
        from data_prep.report.summary import summary_text

    pool.collect_garbage_rarely()
    url = args.output if storage.is_url(args.output) else ""
    if url and part:
        raise BadInput(f"--part: its jobs share a folder, and --output {url} is a URL; name a folder, and upload it")
    if url and storage.glob_folder(url):  # its list would be that of a pattern
        raise BadInput(f"--output {url}: has a wildcard (*, ? or [); name another URL")
    folder = output_folder.local_folder(url) if url else Path(args.output)
    plan = BuildPlan(given, folder, options, _tokenizer(args), args.on_error, url)
    use_ray = args.executor == "ray" and pool.launched_ranks() <= 1
    opened = ray_cluster.opened(_workers(args), folder) if use_ray else pool.opened(_workers(args), args.executor)
    with opened as executor:
        if executor is None:
            return OK
        if plan.given is not None and (unused := options.changed_training()):
            log.warning(f"--tokenizer: it is used as it is; {', '.join(unused)} would only train another")
        if part:
            read = build_part(plan, executor, part, not args.quiet)
            done = f"{args.output}: part {args.part} is read; when all parts are, the same command without --part does the rest"
            log.info(done if read else f"{args.output}: complete already; nothing to do")
            return OK
        summary = build(plan, executor, args.overwrite, not args.quiet)
    if summary is None:
        log.info(f"{args.output}: complete already, from the same input with the same options; nothing to do")
        report = os.path.join(args.output, output_folder.REPORT)
        summary = json.loads(storage.read(report) if url else Path(report).read_bytes())
    else:
        print(summary_text(summary, args.output))
    if args.json:
        with add_path_when_full(Path(args.json)):
            Path(args.json).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return OK


def corpora(inputs: list[str], weights: list[str]) -> list[Corpus]:
    """Corpora of `[NAME=]PATH` items; a path without a name belongs to the last named corpus."""
    paths: dict[str, list[str]] = {}
    name = "input"
    for item in inputs:
        named = re.fullmatch(r"([A-Za-z][\w-]*)=(.+)", item, re.DOTALL)
        # else a path or glob whose first folder is one such as year=2026
        if named and not os.path.lexists(item) and not glob.glob(item.partition("/")[0]):
            name, item = named.groups()
        paths.setdefault(name, []).append(item)
    factors: dict[str, float] = {}
    for item in weights:
        named = re.fullmatch(r"([A-Za-z][\w-]*)=(\d+(?:\.\d*)?|\.\d+)", item)
        if not named or not 0 < float(named[2]) <= 100:
            raise BadInput(f"--weight {item}: give NAME=W with W above 0 and at most 100")
        if named[1] not in paths:
            raise BadInput(f"--weight {item}: no corpus of that name; --input names {', '.join(paths)}")
        if named[1] in factors:
            raise BadInput(f"--weight {item}: the corpus has another weight before; name it once")
        factors[named[1]] = float(named[2])
    return [Corpus(name, tuple(items), factors.get(name, 1.0)) for name, items in paths.items()]


def _workers(args: argparse.Namespace) -> int | None:
    if args.workers is not None and args.workers < 1:
        raise BadInput(f"--workers: must be at least 1, is {args.workers}")
    return args.workers


def _tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer given to the command, None to train one."""
    if args.tokenizer is None:
        return None
    from megabert.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.tokenizer)
    if doubt := tokenizer.doubt():
        raise BadInput(
            f'--tokenizer {doubt}; write one there: {{"do_lower_case": false}}, or true and "strip_accents": false'
        )
    return tokenizer


def _part(args: argparse.Namespace) -> tuple[int, int] | None:
    """(K, N) of --part K/N."""
    if args.part is None:
        return None
    named = re.fullmatch(r"(\d+)/(\d+)", args.part)
    if not named or not 1 <= int(named[1]) <= int(named[2]):
        raise BadInput(f"--part {args.part}: give K/N with K from 1 to N")
    if args.overwrite or args.json:
        raise BadInput("--part: excludes --overwrite and --json")
    return int(named[1]), int(named[2])

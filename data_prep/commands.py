"""The commands `build`, `verify` and `inspect`, after their arguments were parsed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from data_prep import recipe
from data_prep.arguments import actions, corpora, options_of, parser, part_of, tokenizer_of, workers_of
from data_prep.build import build, build_part
from data_prep.common.errors import BadInput
from data_prep.common.records import Corpus
from data_prep.executor import output_folder, pool
from data_prep.options import BuildOptions
from data_prep.report import inspect_dataset
from data_prep.report.summary import summary_text
from megabert.common.errors import OK
from megabert.common.logs import log
from megabert.data import shards


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """What the command line `argv`, parsed as `args`, asks for; the exit code."""
    pool.collect_seldom()
    if args.command == "build":
        return _build(args, argv)
    if args.command == "verify":
        return _verify(args)
    print(inspect_dataset.inspect(args.folder, args.rows, args.seed, args.masking))
    return OK


def _build(args: argparse.Namespace, argv: list[str]) -> int:
    recipe_file = args.recipe
    if recipe_file is None:
        if not args.input:
            raise BadInput("build: give a recipe or --input")
        options, inputs = options_of(args), corpora(args.input, args.weight)
    else:
        args, options, inputs = _from_recipe(args, argv)
    stored = recipe.render(vars(args), inputs, options.read)
    if args.print_recipe:
        print(stored, end="")
        return OK
    if not args.output:
        raise BadInput("build: give --output, the folder of the dataset")
    _check_json(args)
    part = part_of(args)
    with pool.opened(workers_of(args)) as executor:
        if executor is None:
            return OK
        if part:
            read = build_part(
                inputs, args.output, options, executor, part, tokenizer_of(args), args.on_error, not args.quiet
            )
            message = "complete already; nothing to do"
            if read:
                message = (
                    f"part {args.part} is read, {read.counts['bytes read']:,} bytes; when all parts are, the same command "
                    "with --merge in place of --part"
                )
            log.info(f"{args.output}: {message}")
            return OK
        summary = build(
            inputs,
            args.output,
            options,
            executor,
            tokenizer_of(args),
            args.overwrite,
            args.on_error,
            progress=not args.quiet,
            allow=args.allow,
            parts_read=args.merge,
            recipe=stored,
            recipe_file=recipe_file,
        )
    if summary is None:
        log.info(f"{args.output}: complete already, from the same input with the same options; nothing to do")
    else:
        print(summary_text(summary, args.output))
    _write_json(args, summary, Path(args.output))
    return OK


def _from_recipe(args: argparse.Namespace, argv: list[str]) -> tuple[argparse.Namespace, BuildOptions, list[Corpus]]:
    """Arguments, options and corpora of a recipe; options on the command line `argv` replace those of the recipe."""
    if args.input or args.weight:
        raise BadInput(f"{args.recipe}: a recipe names its corpora; leave out --input and --weight")
    path: str = args.recipe
    arguments, tables = recipe.load(path, actions())
    rest = list(argv[1:])
    rest.remove(path)
    args = parser().parse_args([argv[0], *arguments, *rest])
    options = options_of(args)
    return args, options, recipe.corpora(path, tables, options.read)


def _check_json(args: argparse.Namespace) -> None:
    """Raises BadInput, before the work, where the summary can't be written."""
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise BadInput(f"--json {args.json}: its folder does not exist; create it first")


def _write_json(args: argparse.Namespace, summary: dict[str, Any] | None, folder: Path) -> None:
    """Write the summary to the file of `--json`; of a dataset that was complete before, `summary` None, its report."""
    if not args.json:
        return
    if summary is None:
        summary = json.loads((folder / output_folder.REPORT).read_bytes())
    Path(args.json).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _verify(args: argparse.Namespace) -> int:
    problems = 0
    for problem in inspect_dataset.verify(args.folder, workers_of(args) or pool.default_workers(), not args.quiet):
        print(problem)
        problems += 1
    if not problems:
        for folder in inspect_dataset.datasets(args.folder):
            print(f"{folder}: complete, {shards.Manifest.load(folder).rows} rows")
    return 1 if problems else OK

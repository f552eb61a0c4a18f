"""Search for a recipe's keys by successive halving, on documents of the search split; every trial is a row of a table.

    python benchmarks/recipe_search.py --search adamw --winner benchmarks/recipes/adamw-tuned.toml

A search is a TOML file in benchmarks/searches: the recipe it starts from, a range for each key, and the rungs. The same
code searches ours and the peer, whichever system the recipe is of. The held-out documents of the race are not opened:
when the search is over, `--winner` writes its best trial as a recipe, which benchmarks/speedrun.py then scores on them.
A trial that diverges is a row like the others. The table is written after each run; the same command again goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.common.commands import CommandFailed
from benchmarks.race import dataset, halving, recipes, records, tracks
from benchmarks.race.halving import Job, Results, Rung
from benchmarks.race.recipes import Recipe
from megabert.config import toml_files

FOLDER = hardware.ROOT / "benchmarks/searches"
FIRST_SEED = 1_001  # none of the race's
DIVERGED = 3  # exit code of a training that went wrong


@dataclass(frozen=True)
class Search:
    """What is searched: `space` has a range for each key, `digest` is of everything that decides the trials."""

    name: str
    recipe: Recipe
    rungs: tuple[Rung, ...]
    space: dict[str, Any]
    seed: int
    digest: str

    def trial(self, number: int) -> Recipe:
        return self.recipe.with_keys(halving.draw(self.space, number, self.seed))


def names() -> list[str]:
    return toml_files.names(FOLDER)


def load(name: str) -> Search:
    """A search of benchmarks/searches, or the file of that path. Raises ValueError naming file and field."""
    path, tree = toml_files.read(name, FOLDER, "--search", "search")
    try:
        rungs = tuple(Rung(**rung) for rung in tree["rung"])
        recipe, space = recipes.load(tree["recipe"]), dict(tree["space"])
        halving.check(rungs)
        for rung in rungs:
            tracks.track_of(rung.track)
        halving.draw(space, 1, 0)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing; it needs recipe, [space] and [[rung]]") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    decides = {"recipe": recipe.digest, "rungs": [asdict(rung) for rung in rungs], "space": space}
    seed = int(tree.get("seed", 0))
    digest = hashlib.sha256(json.dumps(decides | {"seed": seed}, sort_keys=True).encode()).hexdigest()[:12]
    return Search(path.stem, recipe, rungs, space, seed, digest)


class Table:
    """The rows of a search in its file. Raises ValueError where the file is of another search or other data."""

    def __init__(self, path: Path, search: Search, data: dict[str, str]) -> None:
        self.path = path
        self.settings: dict[str, Any] = {"search": search.name, "digest": search.digest, "recipe": search.recipe.name}
        self.settings |= {"space": search.space, "rungs": [asdict(rung) for rung in search.rungs], "data": data}
        empty = {"settings": self.settings, "rows": []}
        tree: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else empty
        for name in ("digest", "data"):
            if tree["settings"][name] != self.settings[name]:
                raise ValueError(f"{path}: was made by a search with another {name}; name another --json")
        self.rows: list[dict[str, Any]] = tree["rows"]

    def results(self) -> Results:
        return {
            (row["trial"], row["track"], row["seed"]): math.inf if row["bits"] is None else row["bits"]
            for row in self.rows
        }

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        hardware.write_json(self.path, {"settings": self.settings, "rows": self.rows})


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--search", required=True, metavar="NAME", help=f"{', '.join(names())}, or a .toml file")
    add("--text", type=Path, default=dataset.default_text(), help="as of speedrun.py")
    add("--run", type=Path, default=Path("runs/race"), help="folder of shards and runs")
    add("--threads", type=int, default=2, help="of a run on a track of tokens")
    add("--runs", type=int, default=0, metavar="N", help="stop after so many; 0 goes on to the end")
    add("--winner", type=Path, metavar="FILE.toml", help="write the best trial as a recipe when the search is over")
    hardware.add_json(parser, "the table; default: search_NAME.json among the results")
    args = parser.parse_args(argv)
    args.json = args.json or hardware.ROOT / hardware.RESULTS / f"search_{Path(args.search).stem}.json"
    hardware.refuse_dirty(parser, args)
    return args


def run(args: argparse.Namespace, search: Search, job: Job) -> dict[str, Any]:
    """Trains and scores one run; its row. Raises ValueError where it failed otherwise than by diverging."""
    from benchmarks.race import scoring, training

    recipe, track = search.trial(job.trial), tracks.track_of(job.track, args.threads)
    data = dataset.prepare(args.run, args.text, recipe.vocabulary)
    folder = args.run / "searches" / search.name / f"{search.digest}-{job.trial}-{job.track}-{job.seed}"
    row = {"rung": job.rung, "trial": job.trial, "track": job.track, "seed": job.seed}
    row |= {"keys": halving.draw(search.space, job.trial, search.seed)} | records.circumstances()
    figures: dict[str, Any] = {"bits": None, "loss": None, "accuracy": None, "diverged": True}
    try:
        trained = training.train(recipe, track, data, folder, FIRST_SEED + job.seed)
        *_, last = trained.points
        scorer = scoring.Scorer(data.search_split, scoring.SEARCH_ROWS, track.cores)
        found = scorer.score(training.weights_of(last), trained.config)
        if math.isfinite(found["bits"]):
            figures = {**found, "diverged": False} | training.without_weights(last)
            figures["tokens_per_second"] = trained.tokens_per_second
    except CommandFailed as error:
        if error.code != DIVERGED:
            raise
    shutil.rmtree(folder, ignore_errors=True)
    return row | figures


def markdown(search: Search, table: Table) -> str:
    """Every trial, those that came furthest and the best of them first."""
    keys = list(search.space)
    lines = ["| trial | " + " | ".join([*keys, *(f"{r.track}, {r.seeds} seed(s)" for r in search.rungs)]) + " |"]
    lines.append("|" + "---|" * (1 + len(keys) + len(search.rungs)))
    results, order = table.results(), dict[str, list[float]]()
    for trial in sorted({row["trial"] for row in table.rows}):
        cells, means = [], []
        for rung in search.rungs:
            keyed = [(trial, rung.track, seed) for seed in range(rung.seeds)]
            scores = [results[key] for key in keyed if key in results]
            means.append(sum(scores) / len(scores) if scores else math.inf)
            cells.append("" if not scores else "diverged" if math.isinf(means[-1]) else f"{means[-1]:.4f}")
        drawn = halving.draw(search.space, trial, search.seed)
        values = [recipes.written(drawn[key]) if drawn else "" for key in keys]
        order[f"| {trial} | " + " | ".join(values + cells) + " |"] = means[::-1]
    return "\n".join([*lines, *sorted(order, key=lambda line: order[line])])


def go_on(args: argparse.Namespace, search: Search) -> Table:
    """Does the runs that the table does not have, `--runs` of them at most."""
    data = dataset.prepare(args.run, args.text, search.recipe.vocabulary)
    table, done = Table(args.json, search, data.identity()), 0
    while (job := halving.next_job(search.rungs, table.results())) and (not args.runs or done < args.runs):
        row = run(args, search, job)
        table.add(row)
        done += 1
        score = "diverged" if row["diverged"] else f"{row['bits']:.4f} bits a byte"
        print(f"rung {job.rung + 1}, trial {job.trial}, seed {job.seed}: {score}  {row['keys']}", file=sys.stderr)
    return table


def keep_winner(args: argparse.Namespace, search: Search, table: Table) -> None:
    """Writes the winner's recipe where that is asked for and known."""
    best = halving.winner(search.rungs, table.results())
    if best is None:
        left = halving.next_job(search.rungs, table.results())
        print("no winner yet: runs are left" if left else "no winner: the last rung diverged", file=sys.stderr)
    elif args.winner:
        said = (
            f"{search.recipe.name} with the keys of the search {search.name}, trial {best} of {search.rungs[0].trials}"
        )
        change = f"keys of the search {search.name}"
        recipes.save(replace(search.trial(best), name=args.winner.stem, about=said, change=change), args.winner)
        print(f"trial {best} is in {args.winner}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the run that trains is ended too
    try:
        search = load(args.search)
        print(f"{search.name}: {halving.runs(search.rungs)} runs", file=sys.stderr, flush=True)
        table = go_on(args, search)
        keep_winner(args, search, table)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(search, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())

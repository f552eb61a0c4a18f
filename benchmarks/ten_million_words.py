"""Models trained on ten million words: minimal pairs and held-out bits a byte.

    python benchmarks/ten_million_words.py --recipe words-10m gpt-bert --pairs ../shared/data/minimal_pairs --json FILE

The words are taken from the race's text by a rule: all documents that the race does not hold out, novels first, then Wikipedia in the
order of the documents' BLAKE2b digests, up to --words words (separated by white space); the last document is cut. The
SHA-256 of the text is in the result. A recipe is a TOML file of benchmarks/recipes, trained for at most --epochs passes over the
words. `megabert pairs` scores BLiMP (folder `blimp`) and Zorro (`zorro`) as a masked and as a causal model; bits a byte are of the
race's held-out documents. Finished runs are kept in RUN/runs for `bench_finetune.py`; the same command resumes and adds missing ones. Budgets are in
words, so results do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
from benchmarks.common import hardware
from benchmarks.race import dataset, recipes, training
from benchmarks.race.dataset import RaceData, Scorer
from benchmarks.race.recipes import RaceRecipe, track_of
from megabert.common.files import atomic_folder, hash_file

WORDS, EPOCHS = 10_000_000, 10
TAGS = re.compile(r"</?doc\b[^>]*>\n?")  # WikiExtractor's tags around a document
JUDGES, SCORES = ("blimp", "zorro"), ("masked", "causal")


def documents(text: Path) -> Iterator[str]:
    """Novels in the order of their names, then Wikipedia's documents in the order of their digests, without held-out ones."""
    files = [path for _, path in dataset.files_of(text)]
    novels = [path for path in files if path.suffix == ".txt"]
    wiki = (raw for path in files if path not in novels for raw in dataset.documents_of(path))
    for path in novels:
        yield from (raw.decode("utf-8-sig") for raw in dataset.documents_of(path) if not dataset.is_held_out(raw))
    chosen = [raw for raw in wiki if not dataset.is_held_out(raw)]
    yield from (TAGS.sub("", raw.decode()) for raw in sorted(chosen, key=lambda raw: hashlib.blake2b(raw).digest()))


def cut(text: Path, words: int) -> Iterator[str]:
    """Documents of exactly `words` words in total. Raises ValueError if the text has fewer."""
    left = words
    for document in documents(text):
        ends = [match.end() for match in re.finditer(r"\S+", document)]
        if len(ends) >= left:
            yield document[: ends[left - 1]]
            return
        left -= len(ends)
        yield document
    raise ValueError(f"{text}: {words - left:,} words; --words asks for {words:,}")


def prepare(args: argparse.Namespace, vocabulary: int | str) -> RaceData:
    """The shards of the words with a vocabulary of this size, or that of a tokenizer file, and of the held-out documents."""
    own = dataset.folder_of(args.run, args.text)
    work = own / f"words-{args.words}"
    if not (work / "words.jsonl").is_file():
        with atomic_folder(work, "words.jsonl", overwrite=True) as new, (new / "words.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": document}) + "\n" for document in cut(args.text, args.words))
    dataset.split(args.text, own / "race-text")
    stem, digest = own / f"words-{args.words}-vocab", hash_file(work / "words.jsonl")
    return dataset.build_both(work / "words.jsonl", own / "race-text/held_out", stem, digest, vocabulary, 0.01)


def judged(run: Path, pairs: Path, threads: int) -> dict[str, Any]:
    """{judge: {score: table}} of the minimal pairs in the folders of `pairs`, by field."""
    tables: dict[str, Any] = {name: {} for name in JUDGES}
    of = hashlib.sha256(str(pairs.resolve()).encode()).hexdigest()[:8]
    for name, score in itertools.product(JUDGES, SCORES):
        file = run.with_name(f"{run.name}-{of}-{name}-{score}.json")
        command = [sys.executable, "-m", "megabert", "pairs", "--model", str(run), "--pairs", str(pairs / name)]
        if not file.is_file():  # scored in an earlier call
            hardware.call([*command, "--score", score, "--json", str(file)], threads, file.with_suffix(".log"))
        table = json.loads(file.read_text())
        tables[name][score] = {key: table[key] for key in ("accuracy", "pairs", "ties", "fields")}
    return tables


def train(recipe: RaceRecipe, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one run of a recipe, and score it."""
    data = prepare(args, recipe.vocabulary)
    tokens = int(args.epochs * data.manifest.statistics["tokens"])
    # in millions, since a million thousands would be written with an exponent
    track = track_of(f"{tokens / 1e6:g}m-tokens", args.threads)
    run = args.run / "runs" / f"{recipe.name}-{recipe.digest}-{data.documents[:8]}-{args.epochs:g}-{seed}"
    trained = training.train_ours(recipe, track, data, run, seed)
    *_, last = trained.points
    held_out = Scorer(data.held_out, dataset.HELD_OUT_ROWS, args.threads)
    about = {"recipe": recipe.name, "keys": dict(recipe.keys), "vocabulary": recipe.vocabulary, "seed": seed}
    budget = {"words": args.words, "epochs": args.epochs, "tokens": last.tokens, "text": data.documents}
    score = held_out.score(last.weights(), trained.config)
    return about | budget | {"seconds": last.seconds, "held_out": score} | judged(run, args.pairs, args.threads)


def main() -> None:
    parser = hardware.Parser(__doc__, required=True)
    add = parser.add_argument
    add("--recipe", nargs="+", default=["words-10m"], metavar="NAME", help="in benchmarks/recipes, or .toml files")
    add("--seeds", type=int, default=1, help="runs of each recipe")
    add("--words", type=int, default=WORDS)
    add("--epochs", type=float, default=EPOCHS, help=f"passes over the words, at most {EPOCHS}")
    add("--text", type=Path, default=dataset.default_text(), help="folder with enwiki/*/wiki_* and novels/*.txt")
    add("--pairs", type=Path, required=True, help=f"folder with {' and '.join(JUDGES)}")
    add("--run", type=Path, default=Path("runs/words"), help="folder of text, shards and runs")
    add("--threads", type=int, default=2)
    args = parser.parse()
    if not 0 < args.epochs <= EPOCHS:
        parser.error(f"--epochs {args.epochs:g}: must be above 0 and at most {EPOCHS}")
    rows = json.loads(args.json.read_text())["rows"] if args.json.is_file() else []
    for recipe in map(recipes.load, args.recipe):
        for seed in range(42, 42 + args.seeds):
            wanted = (recipe.name, dict(recipe.keys), recipe.vocabulary, seed, args.words, args.epochs)
            names = ("recipe", "keys", "vocabulary", "seed", "words", "epochs")
            if wanted in [tuple(row[name] for name in names) for row in rows]:
                continue
            print(f"{recipe.name}, seed {seed} …", file=sys.stderr, flush=True)
            rows.append(train(recipe, seed, args))
            hardware.write_json(args.json, {"rows": rows})
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown; minimal pairs are scored masked / causally."""
    lines = []
    for row in rows:
        judges = [" / ".join(f"{100 * row[name][s]['accuracy']:.1f}" for s in SCORES) for name in JUDGES]
        budget = [f"{row['words']:,}", f"{row['epochs']:g}", f"{row['seconds'] / 3600:.1f}"]
        lines.append([f"`{row['recipe']}`", str(row["seed"]), *budget, *judges, f"{row['held_out']['bits']:.3f}"])
    return hardware.markdown(("recipe", "seed", "words", "epochs", "hours", "BLiMP", "Zorro", "bits a byte"), lines)


if __name__ == "__main__":
    hardware.run(main)

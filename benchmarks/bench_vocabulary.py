"""Replaced vocabularies: bits a byte on new text by trained tokens and by initialisation of the new tokens' vectors.

    python benchmarks/bench_vocabulary.py --json benchmarks/results/vocabulary.json

A small model with an uncased WordPiece vocabulary is trained on Wikipedia, then with another vocabulary on other text:

    novels   cased WordPiece of the novels
    russian  SentencePiece of Debian's manual pages in Russian
    bytes    byte-level BPE of Debian's manual pages in English

Debian's packages are downloaded by apt-get. One document in twenty is held out before the build. Budgets are in tokens, so results
do not depend on the machine's speed; each finished run is in the file, and the same command adds missing ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import tokenizers
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.race import dataset, training
from benchmarks.race.dataset import RaceData, Scorer
from benchmarks.race.recipes import RaceRecipe, track_of
from megabert import checkpoint
from megabert.commands.convert import convert
from megabert.common.files import appearing
from megabert.hf.mapping import PADDED
from megabert.model import truncated_normal

VOCABULARY = 8_000
# bytes of each text
TEXT = 12 << 20
KEYS = {
    **{"model.kind": "modern", "model.norm": "pre", "model.nsp": False, "model.hidden": 128, "model.heads": 2},
    **{"batch.global_size": 32, "batch.micro_size": 32, "optimizer.name": "muon", "optimizer.weight_decay": 0.1},
    "data.masking.rate": 0.3,
}
BASE = KEYS | {"optimizer.lr": 3e-3, "objective.causal_share": 0.3}
CONTINUED = KEYS | {"optimizer.lr": 1e-3, "warmup": 0.1}
TEXTS = ("novels", "russian", "bytes")
MANUALS = {"russian": ("manpages-ru", "manpages-ru-dev"), "bytes": ("manpages", "manpages-dev")}
OPTIONS = {
    "base": ["--model-type", "wordpiece", "--lowercase"],
    "novels": ["--model-type", "wordpiece"],
    "russian": ["--model-type", "unigram"],
}
INITS = ("random", "mean", "nearest")
# indices among the ten checkpoints of a run
POINTS = (0, 1, 3, 6, -1)
# roff in manual pages: requests with text, and escapes with their output
SHOWN = re.compile(r"^[.'](?:[BIR]{1,2}|S[MBHS])\b ?")
ESCAPES = (
    (r"\\f(?:\[\w*\]|\(..|.)|\\[&|^/,:%]|\\s[-+]?\d", ""),
    (r"\\(?:-|\(hy|\(mi)", "-"),
    (r"\\(?:\(..|\[.*?\]|.)", " "),
)


def manual_pages(packages: tuple[str, ...], work: Path) -> Iterator[str]:
    """The text of the pages, without requests and escapes of roff."""
    tree = work / "-".join(packages)
    if not tree.is_dir():
        (work / "deb").mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *packages], cwd=work / "deb", check=True, stdout=sys.stderr)
        for name in packages:
            archive, *_ = (work / "deb").glob(f"{name}_*.deb")
            subprocess.run(["dpkg", "-x", archive, tree], check=True)
    for path in sorted(tree.glob("usr/share/man/**/*.gz")):
        text = "" if path.is_symlink() else gzip.decompress(path.read_bytes()).decode(errors="ignore")
        lines = [SHOWN.sub("", line).replace('"', "") if SHOWN.match(line) else line for line in text.splitlines()]
        page = "\n".join("" if line[:1] in (".", "'") else line for line in lines)
        for escape, printed in ESCAPES:
            page = re.sub(escape, printed, page)
        if len(page) > 500:
            yield page


def documents(name: str, args: argparse.Namespace) -> Iterator[str]:
    if name in MANUALS:
        return manual_pages(MANUALS[name], args.run)
    files = args.text.glob("enwiki/*/wiki_*" if name == "base" else "novels/*.txt")
    return (document.decode() for document in chain.from_iterable(map(dataset.documents_of, sorted(files))))


def prepare(name: str, args: argparse.Namespace, tokenizer: str = "") -> RaceData:
    """The shards of a text and of its held-out documents, with a vocabulary trained on it or that of the file `tokenizer`."""
    folder, left = args.run / name, args.bytes
    if not (folder / "text").is_dir():
        with (
            appearing(folder / "text", "train.jsonl") as new,
            (new / "train.jsonl").open("w") as train,
            (new / "held_out.jsonl").open("w") as held_out,
        ):
            for number, text in enumerate(documents(name, args)):
                left -= (train if number % 20 else held_out).write(json.dumps({"text": text}) + "\n")
                if left < 0:
                    break
    made = ["--vocab-size", str(VOCABULARY), "--held-out", "0", *OPTIONS.get(name, [])]
    if name == "bytes":
        tokenizer = str(byte_level(folder))
    if tokenizer:
        made = ["--tokenizer", tokenizer, "--held-out", "0"]
    texts = folder / "text/train.jsonl", folder / "text/held_out.jsonl"
    return dataset.build_both(*texts, folder, "every 20th", *made)


def byte_level(folder: Path) -> Path:
    """A byte-level BPE, trained on a text with the tokenizers library."""
    made = tokenizers.ByteLevelBPETokenizer()
    texts = (json.loads(line)["text"] for line in (folder / "text/train.jsonl").open())
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator(texts, VOCABULARY, special_tokens=special, show_progress=False)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def started(init: str, seed: int, base: Path, data: RaceData, run: Path) -> Path:
    """A run folder with the base model and the vocabulary of `data`."""
    shutil.rmtree(run, ignore_errors=True)
    # without text there are no similar tokens
    vocab = data.train / data.manifest.tokenizer["file"] if init == "mean" else data.train
    model = convert(base, run, vocab=vocab)
    if init == "random":
        shutil.rmtree(run)
        torch.manual_seed(seed)
        size, special = model.config.model.vocab_size, [*model.tokenizer.special_ids.values()]
        for name in (name for name in PADDED if name in model.weights):
            old = model.weights[name][:size]
            std = model.config.model.init_std if old.dim() > 1 else 0.0
            new = std * truncated_normal(tuple(old.shape), 1.0)
            new[special] = old[special]
            model.weights[name][:size] = new
        checkpoint.write_start(run, model.weights, {k: v for k, v in model.state.items() if k != "step"})
    return run


def curve(recipe: RaceRecipe, tokens: int, data: RaceData, run: Path, seed: int, rows: int) -> list[dict[str, Any]]:
    """Bits a byte on the held-out text along a run, which resumes after a kill."""
    finished = training.train_ours(recipe, track_of(f"{tokens / 1000:g}k-tokens", threads=1), data, run, seed)
    scorer = Scorer(data.held_out, rows, 1)
    points = [finished.points[i] for i in POINTS]
    return [{"tokens": p.tokens} | scorer.score(training.weights_of(p), finished.config) for p in points]


def study_parser(description: str, run: str, tokens: list[int], rows: int, size: int) -> argparse.ArgumentParser:
    """The options of this study and of `bench_continue.py`, with the defaults of one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, default=dataset.default_text(), help="folder with enwiki/*/wiki_* and novels/*.txt")
    add("--run", type=Path, default=Path(run), help="folder of texts, shards and runs")
    add("--seeds", type=int, default=3)
    add("--tokens", type=int, nargs=2, default=tokens, metavar="N", help="tokens of the base model, and of each run")
    add("--rows", type=int, default=rows, help="held-out rows of a score")
    add("--bytes", type=int, default=size, help="most bytes of each text")
    hardware.add_json(parser, required=True)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = study_parser(__doc__, "runs/vocabulary", tokens=[2_000_000, 100_000], rows=160, size=TEXT)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    result = json.loads(args.json.read_text()) if args.json.is_file() else {"curves": {}}
    curves = result["curves"]

    def note(key: str, points: list[dict[str, Any]]) -> None:
        curves[key] = points
        hardware.write_json(args.json, {"tokens": args.tokens, "curves": curves})
        print(key, *(f"{point['tokens']:,}: {point['bits']:.3f}" for point in points), flush=True)

    base = args.run / "runs/base"
    if "base" not in curves:
        recipe = RaceRecipe("base", "the model that is continued", keys=BASE)
        note("base", curve(recipe, args.tokens[0], prepare("base", args), base, 42, args.rows))
    for seed, name, init in product(range(42, 42 + args.seeds), TEXTS, INITS):
        if (key := f"{name} {init} {seed}") in curves:
            continue
        data, run = prepare(name, args), args.run / "runs" / key.replace(" ", "-")
        start = started(init, seed, base, data, run.with_name("start"))
        weights, state = checkpoint.load_weights(start)
        at_0 = {"tokens": 0} | Scorer(data.held_out, args.rows, 1).score(weights, state["config"])
        keys = CONTINUED | {"init_from": str(start)}
        note(key, [at_0, *curve(RaceRecipe(name, init, keys=keys), args.tokens[1], data, run, seed, args.rows)])
        shutil.rmtree(run)
    print(table(curves))
    return 0


def table(curves: dict[str, list[dict[str, Any]]]) -> str:
    """Bits a byte by vocabulary, initialisation and trained tokens, mean ± sample deviation over the seeds."""
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for key, points in curves.items():
        if key != "base":
            groups.setdefault(key.rpartition(" ")[0], []).append(points)
    lines: list[str] = []
    for name, runs in groups.items():
        cells = [[points[i]["bits"] for points in runs] for i in range(len(runs[0]))]
        shown = [f"{statistics.mean(c):.3f} ± {statistics.stdev(c) if len(c) > 1 else 0:.3f}" for c in cells]
        if not lines:
            heads = [f"{point['tokens']:,}" for point in runs[0]]
            lines += [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

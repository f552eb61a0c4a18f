"""Question to paragraph on held-back articles of SQuAD: an encoder fine-tuned by contrast, its plain mean pooling, and BM25.

    python benchmarks/bench_embeddings.py --model RUN --squad ../shared/data/tasks/squad1.1/train-v1.1.json.gz \\
        --work runs/embeddings --json FILE

Every question of the test articles searches all their paragraphs; of its first ten results recall, MRR and nDCG are
counted by trec_eval's rules for all three alike. The articles are cut in three: learned from, decides about the best weights,
reported. BM25 is `bm25s` with its defaults and English stop words; encoders run by `megabert embed`. ratio is recall@10
of the fine-tuned ones' mean over that of the better of the other two. The file is written after each row, and a repeated
command goes on where it was.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware

TEST, DEV = 10, 20  # every 10th article is reported, of the others every 20th decides
MAIN = "recall@10"
BM25, PLAIN, CONTRASTIVE = "BM25", "mean of the plain model", "fine-tuned by contrast"


def cut(squad: Path, work: Path, train_questions: int, test_articles: int) -> dict[str, Path]:
    """SQuAD's file cut by article into train, dev and test; of the first so many questions, spread over the articles (0:
    all), and of the last so many articles."""
    with gzip.open(squad, "rt") if squad.suffix == ".gz" else squad.open() as file:
        articles = json.load(file)["data"]
    parts: dict[str, list[Any]] = {"train": [], "dev": [], "test": []}
    for number, article in enumerate(articles):
        name = "test" if number % TEST == 0 else "dev" if number % DEV == 5 else "train"
        parts[name].append(article)
    parts["test"] = parts["test"][: test_articles or None]
    if train_questions:
        parts["train"] = first_paragraphs(parts["train"], train_questions)
        parts["dev"] = first_paragraphs(parts["dev"], max(1, train_questions // DEV))
    paths = {}
    for name, chosen in parts.items():
        paths[name] = work / f"{name}.json"
        paths[name].write_text(json.dumps({"version": "1.1", "data": chosen}))
    return paths


def first_paragraphs(articles: list[Any], questions: int) -> list[Any]:
    """The articles with their first paragraphs alone, which have about so many questions in all."""
    share = questions / sum(len(p["qas"]) for a in articles for p in a["paragraphs"])
    return [
        article | {"paragraphs": article["paragraphs"][: max(1, round(share * len(article["paragraphs"])))]}
        for article in articles
    ]


def bm25(path: Path) -> dict[str, Any]:
    """What BM25 finds."""
    import bm25s
    import numpy as np

    from megabert.finetune.embed import metrics, pairs

    given = pairs.read(path, pairs.Columns())
    assert isinstance(given, pairs.Pairs)
    queries, corpus, wanted = pairs.relevant(given)
    started = time.perf_counter()
    index = bm25s.BM25()
    index.index(
        bm25s.tokenize([given.texts[i] for i in corpus], stopwords="en", show_progress=False), show_progress=False
    )
    asked = bm25s.tokenize([given.texts[i] for i in queries], stopwords="en", show_progress=False, return_ids=False)
    places, scores = index.retrieve(asked, k=min(metrics.DEPTH, len(corpus)), show_progress=False)
    seconds = time.perf_counter() - started
    figures = metrics.retrieval(np.asarray(places), np.asarray(scores), wanted)
    sizes = {"questions": len(queries), "paragraphs": len(corpus)}
    return {"settings": "bm25s, defaults, English stop words", **sizes, "runs": [figures], "seconds": round(seconds, 3)}


def plain(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """What the mean of the tokens' vectors of the pre-trained model finds. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "megabert", "embed", "evaluate", "--model", str(args.model), "--pool", "mean"]
    command += ["--test", str(path), "--max-length", str(args.max_length)]
    started = time.perf_counter()
    done = subprocess.run(command, env=hardware.clone_environment(), check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    figures = {name: value for name, value in found.items() if "@" in name}
    return {"command": hardware.shown(command), "runs": [figures], "seconds": round(time.perf_counter() - started, 3)}


def contrastive(args: argparse.Namespace, files: dict[str, Path]) -> dict[str, Any]:
    """What it finds after fine-tuning, a run a seed. Raises CalledProcessError when a run fails."""
    output = args.work / "contrastive"
    settings = f"--lr {args.lr} --batch {args.batch} --epochs {args.epochs} --max-length {args.max_length} "
    settings += f"--seeds {args.seeds} --micro-batch {args.micro_batch} --evaluations 4"
    command = [sys.executable, "-m", "megabert", "embed", "train", "--model", str(args.model), *shlex.split(settings)]
    command += [word for name, path in files.items() for word in (f"--{name}", str(path))]
    command += ["--output", str(output)]
    subprocess.run(command, env=hardware.clone_environment(), check=True)
    summary = json.loads((output / "summary.json").read_text())
    runs = [run["scores"]["test"] for run in summary["runs"]]
    pairs = summary["runs"][0]["items"]
    return {
        "command": hardware.shown(command),
        "pairs": pairs,
        "runs": runs,
        "seconds_a_run": summary["points"][0]["seconds"],
    }


def with_means(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the mean and the deviation of each figure over its runs."""
    scores = {}
    for name in row["runs"][0]:
        seen = [run[name] for run in row["runs"]]
        scores[name] = {"mean": statistics.fmean(seen), "std": statistics.stdev(seen) if len(seen) > 1 else 0.0}
    return row | {"scores": scores}


def compare(rows: dict[str, Any]) -> dict[str, Any]:
    """The fine-tuned model against the better of the others, where all are there."""
    if rows.keys() != {BM25, PLAIN, CONTRASTIVE}:
        return {}
    ours, *others = (rows[name]["scores"][MAIN] for name in (CONTRASTIVE, PLAIN, BM25))
    best = max(other["mean"] for other in others)
    return {"metric": MAIN, "ratio": ours["mean"] / best if best else None, "gain": ours["mean"] - best}


def table(rows: dict[str, Any]) -> str:
    """Markdown: a row a line, figures across."""
    names = list(next(iter(rows.values()))["scores"])
    lines = [f"| | runs | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for label, row in rows.items():
        cells = [f"{100 * row['scores'][n]['mean']:.1f} ± {100 * row['scores'][n]['std']:.1f}" for n in names]
        lines.append(f"| {label} | {len(row['runs'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="run folder, checkpoint or Hugging Face folder")
    add("--squad", type=Path, required=True, metavar="FILE", help="SQuAD 1.1's training file, also .gz")
    add("--work", type=Path, default=hardware.ROOT / "runs/embeddings", help="folder of files and runs")
    add("--seeds", type=int, default=3)
    add("--lr", default="3e-4")
    add("--batch", type=int, default=128)
    add("--micro-batch", type=int, default=0, help="texts of one forward pass; 0: all")
    add("--epochs", type=int, default=1)
    add("--max-length", type=int, default=128, help="tokens of a text")
    add("--questions", type=int, default=0, help="to learn from, about; 0: all 74,272")
    add("--articles", type=int, default=0, help="to report on; 0: all 45")
    hardware.add_json(parser, "write the result here")
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    args.work.mkdir(parents=True, exist_ok=True)
    files = cut(args.squad, args.work, args.questions, args.articles)
    rows: dict[str, Any] = {}
    for name, measure in (
        (BM25, lambda: bm25(files["test"])),
        (PLAIN, lambda: plain(args, files["test"])),
        (CONTRASTIVE, lambda: contrastive(args, files)),
    ):
        rows[name] = with_means(measure())
        if args.json:
            hardware.write_json(args.json, {"model": described(args.model), "rows": rows} | compare(rows))
    print(table(rows))


def described(model: Path) -> dict[str, Any]:
    """How the model was pre-trained, and what that run measured of it."""
    from megabert import hf as pretrained
    from megabert.hf import model_card

    found = pretrained.load(model)
    return model_card.recipe(found) | model_card.figures(found)


if __name__ == "__main__":
    main()

"""Texts a second of vectors and of labels on the CPU, against sentence-transformers' `encode` and transformers' pipeline.

    python benchmarks/bench_predict.py --vocab ../shared/data/bert-base-uncased-vocab.txt --json FILE

The same weights, tokenizer, texts and precision on both sides: fp32 against fp32, bf16 against bf16. Texts have 16 tokens each,
512 each, or mixed lengths (log-normal, 8 to 512, in random order), of random words of the vocabulary. Every side is first tried
with several batch sizes on a part of the texts, then both are timed alternately, each with its best. In fp32 vectors and
probabilities must equal the peers' to 1e-4, and all labels, otherwise the command fails; `error` is the largest difference to the
peer in fp32. Models are loaded before timing; ours reads a file of texts and writes the labels to one. Both sides keep freed
memory (glibc's mallopt), which the peers do not by default. ratio is ours over the peer, above 1 is better.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "true"  # ours would disable it for all sides
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.bench_step import SIZES
from benchmarks.common import hardware
from benchmarks.common.measure import seconds_of, take_turns
from benchmarks.peers import hf_predict
from megabert import hf as pretrained
from megabert.commands.extraction import Extractor
from megabert.common.environment import disable_malloc_trimming
from megabert.config import ModelConfig
from megabert.finetune import heads, prediction, save, tasks
from megabert.finetune.save import Described

TOLERANCE = 1e-4
TOKENS = {"mini": 49_152, "base": 4_096}  # tokens of the texts of one kind: some seconds on two cores
BATCHES = (1, 8, 32, 128)  # batch sizes of the peers in texts
BATCH_TOKENS = (512, 1024, 4096)  # batch sizes of ours in tokens
LABELS = ("no", "yes")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Side:
    """`run(texts, batch)` returns a comparable result."""

    run: Callable[[Sequence[str], int], Any]
    # batch sizes to try: texts of the peers, tokens of ours
    batches: tuple[int, ...]


def texts_of_tokens(vocab: Path, lengths: Sequence[int]) -> list[str]:
    """A text for each length in tokens, including [CLS] and [SEP]: random words of the vocabulary of one token each."""
    words = [line for line in vocab.read_text(encoding="utf-8").splitlines() if line.isascii() and line.isalpha()]
    draw = np.random.default_rng(1)
    return [" ".join(words[i] for i in draw.integers(len(words), size=length - 2)) for length in lengths]


def lengths_of(kind: str, tokens: int) -> list[int]:
    """Lengths of as many texts as have about `tokens` tokens."""
    if kind != "mixed":
        length = {"short": 16, "long": 512}[kind]
        return [length] * (tokens // length)
    draw = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(draw.lognormal(4.0, 1.0), 8, 512)))
    return lengths


def make_models(shape: str, vocab: Path, folder: Path) -> tuple[Path, Path, Path]:
    """Folders with the same random weights: Hugging Face's encoder and classifier, and ours."""
    size = ModelConfig(**SIZES[shape], vocab_size=len(vocab.read_text().splitlines()), dropout=0)
    encoder, classifier = hf_predict.make(size, vocab, LABELS, folder)
    start = pretrained.load(encoder)
    module = heads.build(start.config, "classify", 2, start.weights, CPU, torch.float32)
    weights = load_file(classifier / "model.safetensors")
    module.head.output.load_state_dict({name: weights[f"classifier.{name}"] for name in ("weight", "bias")})
    task = tasks.custom("classify", ["text"], "label", ["accuracy"], "", LABELS)
    described = Described(task, LABELS, 512, 128, start.config)
    save.save(folder / "ours", described, module.state_dict(), start.tokenizer, {})
    return encoder, classifier, folder / "ours"


def our_vectors(encoder: Path, precision: str) -> Side:
    extractor = Extractor(pretrained.load(encoder), pool="mean", precision=precision)

    def run(texts: Sequence[str], batch: int) -> np.ndarray:
        extractor.batch_tokens = batch
        return extractor.encode(texts)

    return Side(run, BATCH_TOKENS)


def our_labels(model: Path, precision: str, work: Path) -> Side:
    """Prediction from file to file, as in the command; (labels, probability of each)."""
    ready = prediction.ready(model, CPU, precision)

    def run(texts: Sequence[str], batch: int) -> list[str]:
        given, output = work / "texts.tsv", work / "labels.tsv"
        given.write_text("text\n" + "".join(f"{text}\n" for text in texts))
        prediction.BATCH_TOKENS = batch
        prediction.predict_with(ready, ready.described.task, given, output)
        return [line.split("\t")[1] for line in output.read_text().splitlines()[1:]]

    return Side(run, BATCH_TOKENS)


def our_probabilities(model: Path, precision: str, work: Path) -> np.ndarray:
    """float64 [n]: probability of the likelier label of the texts that `our_labels` wrote last."""
    prediction.predict_file(model, work / "texts.tsv", work / "labels.tsv", precision=precision, probabilities=True)
    return np.loadtxt(work / "labels.tsv", skiprows=1, usecols=(2, 3), ndmin=2).max(1)


def best_batches(sides: Mapping[str, Side], texts: Sequence[str]) -> dict[str, int]:
    """The fastest batch of each side, tried once each on `texts`."""
    best = {}
    for name, side in sides.items():
        seconds = {}
        for batch in side.batches:
            side.run(texts[: len(texts) // 4 + 1], batch)  # warm-up of shapes and memory
            seconds[batch] = seconds_of(partial(side.run, texts, batch), CPU)
        best[name] = min(seconds, key=seconds.__getitem__)
    return best


def compare(peer: Side, ours: Side, texts: Sequence[str], rounds: int) -> tuple[dict[str, Any], Any, Any]:
    """Figures of both sides, with our ratio, the peer's result and ours."""
    sides = {"peer": peer, "ours": ours}
    batches = best_batches(sides, texts[: max(8, len(texts) // 4)])
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        results[name] = sides[name].run(texts, batches[name])

    seconds = take_turns(sides, rounds, lambda name: seconds_of(partial(run, name), CPU))
    figures: dict[str, Any] = {
        name: {"texts_per_second": len(texts) / statistics.median(times), "batch": batches[name], "seconds": times}
        for name, times in seconds.items()
    }
    return figures | {"ratio": ratio(seconds)}, results["peer"], results["ours"]


def ratio(seconds: Mapping[str, list[float]]) -> float:
    """Median over the rounds of the peer's time over ours."""
    return statistics.median(a / b for a, b in zip(seconds["peer"], seconds["ours"], strict=True))


def measure(folders: tuple[Path, Path, Path], texts: Sequence[str], work: Path, rounds: int) -> dict[str, Any]:
    """Vectors and labels of `texts` in each precision. Raises ValueError if ours in fp32 differ from the peers'."""
    encoder, classifier, ours = folders
    report: dict[str, Any] = {"texts": len(texts)}
    exact: dict[str, np.ndarray] = {}
    for precision, dtype in PRECISIONS.items():
        peer = Side(hf_predict.encoder(encoder, dtype), BATCHES)
        vectors, theirs, mine = compare(peer, our_vectors(encoder, precision), texts, rounds)
        unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (theirs, mine)]
        peer = Side(hf_predict.classifier(classifier, dtype), BATCHES)
        labels, given, our_given = compare(peer, our_labels(ours, precision, work), texts, rounds)
        likely = [np.array([one["score"] for one in given]), our_probabilities(ours, precision, work)]
        exact = exact or {"vectors": unit[0], "labels": likely[0]}
        for figures, name, results in ((vectors, "vectors", unit), (labels, "labels", likely)):
            errors = [float(np.abs(result - exact[name]).max()) for result in results]
            figures["error"] = dict(zip(("peer", "ours"), errors, strict=True))
        labels["same_labels"] = sum(a["label"] == b for a, b in zip(given, our_given, strict=True)) / len(texts)
        # false for figures that are not finite
        equal = np.abs(mine - theirs).max() <= TOLERANCE and labels["error"]["ours"] <= TOLERANCE
        if precision == "fp32" and not (equal and labels["same_labels"] == 1):
            raise ValueError(f"vectors or labels are not the peer's: {vectors['error']}, {labels['error']}")
        report[precision] = {"vectors": vectors, "labels": labels}
    return report


def table(shapes: Mapping[str, Any]) -> str:
    """A Markdown table with a line for each model, kind of texts and precision."""
    rows = []
    for (shape, kinds), precision in product(shapes.items(), PRECISIONS):
        for kind, result in kinds.items():
            rows.append([shape, kind, precision])
            for of in result[precision].values():
                peer, ours = (f"{of[side]['texts_per_second']:,.1f}" for side in ("peer", "ours"))
                rows[-1] += [peer, f"{ours} ({of['ratio']:.2f}x)"]
    return hardware.markdown(("model", "texts", "precision", "encode/s", "ours", "pipeline/s", "ours"), rows)


def main() -> None:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    add("--vocab", type=Path, required=True, help="BERT's uncased vocab.txt")
    add("--shapes", nargs="+", choices=TOKENS, default=list(TOKENS))
    add("--kinds", nargs="+", choices=("short", "mixed", "long"), default=["short", "mixed", "long"])
    add("--rounds", type=int, default=3)
    args = parser.parse()
    disable_malloc_trimming()
    shapes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for shape in args.shapes:
            folder = Path(scratch, shape)
            folder.mkdir()
            folders = make_models(shape, args.vocab, folder)
            shapes[shape] = {}
            for kind in args.kinds:
                texts = texts_of_tokens(args.vocab, lengths_of(kind, TOKENS[shape]))
                try:
                    shapes[shape][kind] = measure(folders, texts, folder, args.rounds)
                except ValueError as error:
                    raise ValueError(f"{shape}, {kind}: {error}") from None
                print(table({shape: {kind: shapes[shape][kind]}}), flush=True)
                about = {"rounds": args.rounds, "threads": torch.get_num_threads()}
                hardware.write_json(args.json, about | {"shapes": shapes})
    print(table(shapes))


if __name__ == "__main__":
    hardware.run(main)

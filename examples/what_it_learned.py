"""What a run has learned: held-out words it fills in right, three sentences filled in before and after training, its loss curve.

python examples/what_it_learned.py runs/quickstart/run data/seq128

The sentences are the first of the held-out documents that fit a line and hold a word to hide, whatever the model makes
of them. Beside the share of right answers stands that of always saying the training rows' most frequent piece.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megabert import evaluation
from megabert import hf as pretrained
from megabert.commands.fill import Filler
from megabert.config import MaskingConfig
from megabert.data.masking import IGNORE
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.hf import Pretrained
from megabert.model import BertForPreTraining

EXAMPLES = 3
WORDS = 8, 18  # of a sentence that is shown
COMMON = 5_000  # an answer is a word that is at least one piece in so many of the training rows
SENTENCE = re.compile(r"[A-Z][^.!?⁇]*[.!?]")  # no ⁇: a character that the tokenizer does not know
WORD = re.compile(r"(?<= )[a-z]{4,}(?=[ .,;!?])")
WIDTH, HEIGHT = 60, 8  # characters of the loss curve


def piece_counts(dataset: Dataset) -> np.ndarray:
    """int64 [vocab]: how often each id is in the rows."""
    counts = np.zeros(dataset.manifest.vocab_size, np.int64)
    for first in range(0, dataset.rows, 8192):
        rows = dataset.read(np.arange(first, min(first + 8192, dataset.rows)))
        counts += np.bincount(rows.ids.ravel(), minlength=len(counts))
    return counts


def right(found: Pretrained, held_out: Dataset, most_frequent: int) -> tuple[float, float, int]:
    """Shares of the hidden held-out pieces that the model gets right and that are the most frequent one, and how many
    there are."""
    data = found.config.data.model_copy(update={"masking": MaskingConfig()})
    cfg = found.config.model_copy(update={"data": data})
    batches = list(evaluation.fixed_batches(held_out, found.tokenizer, cfg))
    sums = evaluation.batch_sums(found.model(torch.device("cpu")), batches, torch.device("cpu"))
    labels = torch.cat([batch.mlm_labels.flatten() for batch in batches])
    hidden = int((labels != IGNORE).sum())
    return float(sums[1] / sums[2]), int((labels == most_frequent).sum()) / hidden, hidden


def untrained(found: Pretrained, counts: np.ndarray) -> Pretrained:
    """The same model with weights as a run begins with, on rows of these piece counts."""
    torch.manual_seed(found.config.seed)
    fresh = BertForPreTraining(found.config.model, device="cpu", dtype=torch.float32)
    if found.config.model.frequency_bias:
        fresh.start_from_frequencies(torch.from_numpy(counts))
    return replace(found, weights=fresh.state_dict())


def sentences(held_out: Dataset, tokenizer: Tokenizer, counts: np.ndarray) -> list[tuple[str, str]]:
    """(sentence with [MASK], the word under it) of the first sentences that fit."""
    chosen: list[tuple[str, str]] = []
    common = {tokenizer.pieces[i].strip() for i in np.flatnonzero(counts * COMMON >= counts.sum())}
    for row in range(held_out.rows):
        rows = held_out.read(np.array([row]))
        start = 0
        for length in rows.bounds[0, :, 0].tolist():
            text = tokenizer.decode(rows.ids[0, start : start + length])
            start += length
            for sentence in SENTENCE.findall(text):
                words = [m for m in WORD.finditer(sentence) if m[0] in common]
                if WORDS[0] <= len(sentence.split()) <= WORDS[1] and words:
                    hidden = words[len(words) // 2]
                    chosen.append((f"{sentence[: hidden.start()]}[MASK]{sentence[hidden.end() :]}", hidden[0]))
                    break
            if len(chosen) == EXAMPLES:
                return chosen
    return chosen


def answers(filler: Filler, text: str) -> str:
    (words,) = filler.fill(text, top=3).words
    return ", ".join(f"{word} {p:.0%}" for word, p in words)


def chart(values: Sequence[float], width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Lines of a picture of a curve: the mean of each column's share of the values, high values on top."""
    width = min(width, len(values))
    columns = [float(np.mean(part)) for part in np.array_split(np.asarray(values), width)]
    low, high = min(columns), max(columns)
    levels = [round((value - low) / ((high - low) or 1.0) * (height - 1)) for value in columns]
    lines = []
    for level in range(height - 1, -1, -1):
        mark = f"{low + (high - low) * level / (height - 1):7.2f} |" if level in (0, height - 1) else f"{'':7} |"
        lines.append(mark + "".join("*" if column == level else " " for column in levels).rstrip())
    return lines


def main(run: str, data: str) -> None:
    found, dataset = pretrained.load(run), Dataset(data)
    held_out = evaluation.held_out(data, found.config)
    counts = piece_counts(dataset)
    counts[list(found.tokenizer.special_ids.values())] = 0
    most_frequent = int(counts.argmax())

    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    print(f"training loss, updates {logged[0][0]} to {logged[-1][0]}")
    print("\n".join(chart([loss for _, loss in logged])))

    print("\nheld-out sentences; the three likeliest words for [MASK]")
    before, after = Filler(untrained(found, counts)), Filler(found)
    for text, word in sentences(held_out, found.tokenizer, counts):
        print(f"  {text}   ({word})")
        print(f"      untrained: {answers(before, text)}")
        print(f"      trained:   {answers(after, text)}")

    ours, frequent, hidden = right(found, held_out, most_frequent)
    piece = found.tokenizer.pieces[most_frequent].strip() or "a blank"
    print(
        f"\nright: {ours:.1%} of {hidden:,} held-out masks; always saying the most frequent piece ({piece!r}): {frequent:.1%}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Results of a run: training loss, three held-out sentences filled in before and after training, accuracy.

python -m megabert.commands.quickstart.results runs/quickstart/run runs/quickstart/data

The sentences are the first in the held-out documents that fit a line and have a frequent word to mask, independent of the model. The
accuracy is compared with that of always predicting the most frequent token of the training rows.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megabert import config as configuration
from megabert import evaluation, hf
from megabert.commands.fill import Filler
from megabert.common.run_files import METRICS, json_lines
from megabert.data.masking import IGNORE
from megabert.data.mixture import token_counts
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.hf import Pretrained
from megabert.model import BertForPreTraining

EXAMPLES = 3
# words of a sentence that is shown
WORDS = 8, 18
# a masked word is a token that is at least one in this many of the training rows'
FREQUENT = 5_000
# without ⁇, a character that the tokenizer does not know
SENTENCE = re.compile(r"[A-Z][^.!?⁇]*[.!?]")
WORD = re.compile(r"(?<= )[a-z]{4,}(?=[ .,;!?])")


def accuracy(trained: Pretrained, held_out: Dataset, most_frequent: int) -> tuple[float, float, int]:
    """Accuracy under the held-out masks of the model and of one token, and the number of masks."""
    cfg = configuration.replace(trained.config, "data.masking", configuration.MaskingConfig())
    batches = list(evaluation.fixed_batches(held_out, trained.tokenizer, cfg))
    sums = evaluation.batch_sums(trained.model(torch.device("cpu")), batches, torch.device("cpu"))
    labels = torch.cat([batch.mlm_labels.flatten() for batch in batches])
    masks = int((labels != IGNORE).sum())
    return float(sums[1] / sums[2]), int((labels == most_frequent).sum()) / masks, masks


def untrained(trained: Pretrained, counts: np.ndarray) -> Pretrained:
    """The same model with the initial weights of a run on rows with these counts."""
    torch.manual_seed(trained.config.seed)
    initial = BertForPreTraining(trained.config.model, device="cpu", dtype=torch.float32)
    if trained.config.model.frequency_bias:
        initial.init_decoder_bias(torch.from_numpy(counts))
    return replace(trained, weights=initial.state_dict())


def sentences(held_out: Dataset, tokenizer: Tokenizer, counts: np.ndarray) -> list[tuple[str, str]]:
    """(sentence with [MASK], the masked word) of the first sentences that fit."""
    chosen: list[tuple[str, str]] = []
    frequent = {tokenizer.tokens[i].strip() for i in np.flatnonzero(counts * FREQUENT >= counts.sum())}
    for row in range(held_out.rows):
        rows, start = held_out.read(np.array([row])), 0
        for length in rows.bounds[0, :, 0].tolist():
            text = tokenizer.decode(rows.ids[0, start : start + length])
            start += length
            for sentence in SENTENCE.findall(text):
                words = [match for match in WORD.finditer(sentence) if match[0] in frequent]
                if WORDS[0] <= len(sentence.split()) <= WORDS[1] and words:
                    word = words[len(words) // 2]
                    chosen.append((f"{sentence[: word.start()]}[MASK]{sentence[word.end() :]}", word[0]))
                    break
            if len(chosen) == EXAMPLES:
                return chosen
    return chosen


def predictions(filler: Filler, text: str) -> str:
    (words,) = filler.fill(text, top=3)
    return ", ".join(f"{word} {p:.0%}" for word, p in words)


def main(run: str, data: str) -> None:
    trained, held_out = hf.load(run), evaluation.held_out(data)
    counts = token_counts(Dataset(data), trained.tokenizer.predicted())

    lines = json_lines(Path(run) / METRICS)
    logged = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    tenths = np.array_split([loss for _, loss in logged], min(10, len(logged)))
    print(f"training loss, updates {logged[0][0]} to {logged[-1][0]}, the mean of each tenth")
    print("  " + " ".join(f"{tenth.mean():.2f}" for tenth in tenths))

    print("\nheld-out sentences; the three likeliest words for [MASK]")
    before, after = Filler(untrained(trained, counts)), Filler(trained)
    for text, word in sentences(held_out, trained.tokenizer, counts):
        print(f"  {text}   ({word})")
        print(f"      untrained: {predictions(before, text)}")
        print(f"      trained:   {predictions(after, text)}")

    most_frequent = int(counts.argmax())
    ours, constant, masks = accuracy(trained, held_out, most_frequent)
    token = repr(trained.tokenizer.tokens[most_frequent].strip() or "a blank")
    always = f"always the most frequent token ({token}): {constant:.1%}"
    print(f"\naccuracy: {ours:.1%} of {masks:,} held-out masks; {always}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Held-out samples: what the model says under the masks of a few held-out rows, the same ones at every evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megabert.common.labels import IGNORE
from megabert.data.batch import Batch
from megabert.data.tokenizer import Tokenizer

ROWS = 3  # of each the beginning of its longest sequence
WINDOW = 40  # tokens of it
TOP = 3  # what the model holds likeliest
EVERY = 5  # left to right, where every token is predicted, one of so many


@dataclass(frozen=True)
class Part:
    """The samples of one micro-batch: their texts, and where its logits are wanted (int64 [N], flat)."""

    batch: Batch
    samples: list[dict[str, Any]]
    at: Tensor


class HeldOutSamples:
    """The samples of some batches, on the CPU until they are looked at."""

    def __init__(self, batches: Iterable[Batch], tokenizer: Tokenizer, causal: bool) -> None:
        """`batches` under the mask of evaluation; `causal`: each token predicts the next."""
        self._pieces, self._causal = tokenizer.pieces, causal
        self._parts = [part for part in map(self._part, batches) if len(part.at)]

    def _part(self, batch: Batch) -> Part:
        samples, at = [], []
        width = batch.input_ids.shape[1]
        for row, row_id in enumerate(batch.row_ids.tolist()):
            lengths = batch.lengths[row].tolist()
            longest = lengths.index(max(lengths))
            first = row * width + sum(lengths[:longest])
            last = first + min(lengths[longest], WINDOW) - self._causal  # whose prediction is shown
            slots = zip(batch.mlm_positions[row].tolist(), batch.mlm_labels[row].tolist(), strict=True)
            chosen = [(p, label) for p, label in slots if label != IGNORE and first <= p < last]
            chosen = chosen[EVERY - 1 :: EVERY] if self._causal else chosen
            if chosen:
                at += [p for p, _ in chosen]
                samples.append(self._sample(batch, row_id, first, last + self._causal, chosen))
        return Part(batch, samples, torch.tensor(at, dtype=torch.int64))

    def _sample(self, batch: Batch, row_id: int, first: int, end: int, chosen: list[tuple[int, int]]) -> dict[str, Any]:
        """A sample as it is written, without what is said: its tokens as they are, and of each mask where and as what it
        stands in the input."""
        seen = [self._pieces[i] for i in batch.input_ids.flatten()[first:end].tolist()]
        tokens, masks = list(seen), []
        for p, label in chosen:
            at = p - first + self._causal
            tokens[at] = self._pieces[label]
            masks.append({"at": at, "shown": "" if self._causal else seen[at]})
        return {"row": row_id, "tokens": tokens, "masks": masks}

    @torch.no_grad()
    def look(self, module: nn.Module, device: torch.device) -> list[dict[str, Any]]:
        """The samples with what `module` says: {"row": of the held-out split, "tokens": pieces, "masks": [{"at": index in
        tokens, "shown": the piece in the input, "" where it is to come, "said": [[piece, probability] …]}]}.

        Leaves train/eval as it was, and draws no random numbers. At ZeRO stage 3 a collective.
        """
        was_training, found = module.training, []
        module.eval()
        no_dropout = torch.zeros(1, dtype=torch.int64, device=device)
        for part in self._parts:
            inputs = part.batch.to(device).inputs()
            logits = module(**inputs, seed=no_dropout, logits_at=part.at.to(device))
            best = logits.float().softmax(-1).topk(min(TOP, logits.shape[1]))
            said = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            for sample in part.samples:
                masks = [mask | {"said": self._words(*next(said))} for mask in sample["masks"]]
                found.append(sample | {"masks": masks})
        module.train(was_training)
        return found

    def _words(self, probabilities: list[float], ids: list[int]) -> list[list[Any]]:
        return [[self._pieces[i], round(p, 4)] for p, i in zip(probabilities, ids, strict=True)]

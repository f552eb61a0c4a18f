"""Held-out evaluation under a fixed mask, so that any two evaluations are comparable, and samples of its predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megabert.config import Config
from megabert.data.batch import Batch
from megabert.data.loader import MaskedRows
from megabert.data.masking import IGNORE, MaskingVocabulary, held_out_masking
from megabert.data.mixture import token_counts
from megabert.data.shards import Dataset, Manifest, dataset_folder
from megabert.data.tokenizer import Tokenizer
from megabert.engine import loss_table
from megabert.model import BertForPreTraining, evaluating

EVAL_SEED = 20181011  # fixed: the mask of a held-out row is the same in every run
# A sample: number of tokens of a row's longest sequence, of the likeliest words for each mask, and, causal, the interval of the
# predicted tokens that are shown.
SAMPLE_ROWS, SAMPLE_TOKENS, SAMPLE_WORDS, CAUSAL_STRIDE = 3, 40, 3, 5


def held_out(data: str) -> Dataset:
    """The held-out split of a dataset. Raises ValueError when it has none."""
    folder = dataset_folder(data)
    part = Manifest.load(folder).held_out
    if part is None:
        raise ValueError(f"{data}: no held-out split; build it with data_prep build --held-out SHARE")
    return Dataset(folder / part["path"])


def fixed_batches(
    dataset: Dataset,
    tokenizer: Tokenizer | MaskingVocabulary,
    config: Config,
    rank: int = 0,
    world: int = 1,
    rows: int = 0,
) -> Iterator[Batch]:
    """This rank's share of the first `eval.rows` held-out rows, or of the first `rows` of those, each once over all ranks, under the
    fixed mask.

    Every rank gets the same number of batches of `batch.micro_size` rows, as collectives need; the remaining places are fillers
    (row id -1). Raises DamagedRow.
    """
    size, masking = config.batch.micro_size, held_out_masking(config)
    source = MaskedRows(dataset, tokenizer, EVAL_SEED, size, masking)
    layout, most = source.layout(size, masking), min(dataset.rows, rows or config.eval.rows, config.eval.rows)
    for first in range(0, most, size * world):
        row_ids = first + rank * size + np.arange(size)
        row_ids[row_ids >= most] = -1
        narrow, wide = map(torch.from_numpy, source.make(row_ids, np.zeros_like(row_ids), masking))
        yield from layout.micro_batches(narrow, wide, size)


def with_sources(batches: Iterable[Batch], dataset: Dataset) -> Iterator[Batch]:
    """`batches` of `dataset` with the sources of their predictions if it records them. Raises as `Dataset.sources`."""
    numbers = np.arange(len(dataset.source_names))[:, None, None]
    for batch in batches:
        if len(numbers):
            positions, ends = batch.mlm_positions.numpy(), batch.lengths.numpy().cumsum(1)
            at = positions - np.arange(len(positions))[:, None] * batch.input_ids.shape[1]  # (B, K), in the row
            slot = np.minimum((at[:, :, None] >= ends[:, None]).sum(2), ends.shape[1] - 1)
            # of the predicted token; causal: the next one
            part = batch.segment_ids.numpy().ravel()[positions + batch.causal]
            of_source = dataset.sources[batch.row_ids[:, None], slot, part] == numbers
            batch = replace(batch, sources=torch.from_numpy(of_source & (batch.mlm_labels.numpy() != IGNORE)))
        yield batch


def batch_sums(
    model: BertForPreTraining, batches: Iterable[Batch], device: torch.device, sources: int = 0
) -> torch.Tensor:
    """Sums over `batches`, fp64 [6 + 3 sources]: MLM loss, correct, predictions; NSP loss, correct, pairs; then MLM's of each
    source. Leaves train/eval as it was."""
    sums = torch.zeros(6 + 3 * sources, dtype=torch.float64, device=device)
    with evaluating(model):
        for batch in batches:
            sums += loss_table(model(**batch.to(device).inputs()), model.counts(batch)).flatten()
    return sums


def summary(sums: torch.Tensor, sources: Sequence[str] = ()) -> dict[str, float]:
    """`eval/…` metrics from the sums of all ranks, MLM's and NSP's first, then MLM's of those `sources` with predictions. Raises
    ValueError when nothing was predicted."""
    mlm_loss, mlm_correct, predictions, nsp_loss, nsp_correct, pairs = sums[:6].tolist()
    if not predictions:
        raise ValueError("the held-out split has no token to predict")
    loss = mlm_loss / predictions
    values = {
        "eval/mlm_loss": loss,
        "eval/mlm_accuracy": mlm_correct / predictions,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/predictions": predictions,
    }
    if pairs:
        values |= {"eval/nsp_loss": nsp_loss / pairs, "eval/nsp_accuracy": nsp_correct / pairs, "eval/pairs": pairs}
    for name, (loss, correct, count) in zip(sources, sums[6:].view(-1, 3).tolist(), strict=False):
        of_source = {"loss": loss / count, "accuracy": correct / count, "predictions": count} if count else {}
        values |= {f"eval/{metric}_by_source/{name}": value for metric, value in of_source.items()}
    return values


def dataset_metrics(name: str, metrics: Mapping[str, float], bytes_per_token: float) -> dict[str, float]:
    """Loss and bits a byte of one of several datasets, from its `summary`, under its name."""
    loss = metrics["eval/mlm_loss"]
    return {
        f"eval/loss_by_dataset/{name}": loss,
        f"eval/bits_per_byte_by_dataset/{name}": loss / math.log(2) / bytes_per_token,
    }


def bytes_per_token(dataset: Dataset, tokenizer: Tokenizer, causal: bool) -> float:
    """Mean UTF-8 bytes of the predicted tokens of a dataset's rows, including the space before a word. `causal`: [SEP], which has none,
    is among them. Raises as `Dataset.read`."""
    counts = token_counts(dataset, tokenizer.predicted(causal))
    sizes = np.array([len(token) for token in tokenizer.token_bytes()])
    sizes[list(tokenizer.special_ids.values())] = 0
    return float(counts @ sizes / max(counts.sum(), 1))


class HeldOutSamples:
    """The samples of some batches: predictions for the masks of a few held-out rows. The batches stay on the CPU."""

    def __init__(self, batches: Iterable[Batch], tokenizer: Tokenizer, causal: bool) -> None:
        """`batches` under the mask of evaluation; `causal`: each token predicts the next."""
        self._vocabulary, self._causal = tokenizer.tokens, causal
        self._batches = [sampled for sampled in map(self._sampled, batches) if sampled[1]]

    def _sampled(self, batch: Batch) -> tuple[Batch, list[dict[str, Any]], Tensor]:
        """A micro-batch, its samples without predictions, and the flat positions of the logits that they need, int64 [N]."""
        samples, at = [], []
        width = batch.input_ids.shape[1]
        for row, row_id in enumerate(batch.row_ids.tolist()):
            lengths = batch.lengths[row].tolist()
            longest = lengths.index(max(lengths))
            first = row * width + sum(lengths[:longest])
            # after the last position whose prediction is shown
            last = first + min(lengths[longest], SAMPLE_TOKENS) - self._causal
            predicted = zip(batch.mlm_positions[row].tolist(), batch.mlm_labels[row].tolist(), strict=True)
            chosen = [(p, label) for p, label in predicted if label != IGNORE and first <= p < last]
            chosen = chosen[CAUSAL_STRIDE - 1 :: CAUSAL_STRIDE] if self._causal else chosen
            if chosen:
                at += [p for p, _ in chosen]
                samples.append(self._sample(batch, row_id, first, last + self._causal, chosen))
        return batch, samples, torch.tensor(at, dtype=torch.int64)

    def _sample(self, batch: Batch, row_id: int, first: int, end: int, chosen: list[tuple[int, int]]) -> dict[str, Any]:
        """A sample without predictions: its original tokens and, for each mask, its index and the token in the input."""
        seen = [self._vocabulary[i] for i in batch.input_ids.flatten()[first:end].tolist()]
        tokens, masks = list(seen), []
        for p, label in chosen:
            at = p - first + self._causal
            tokens[at] = self._vocabulary[label]
            masks.append({"at": at, "shown": "" if self._causal else seen[at]})
        return {"row": row_id, "tokens": tokens, "masks": masks}

    def predict(self, module: nn.Module, device: torch.device) -> list[dict[str, Any]]:
        """The samples with the predictions of `module`: {"row": of the held-out split, "tokens": [token …], "masks": [{"at": index in
        tokens, "shown": the token in the input, "" of a causal model, "predicted": [[token, probability] …]}]}.

        Leaves train/eval as it was, and draws no random numbers. At ZeRO stage 3 a collective.
        """
        samples, no_dropout = [], torch.zeros(1, dtype=torch.int64, device=device)
        for batch, without, at in self._batches:
            inputs = batch.to(device).inputs()
            with evaluating(module):
                logits = module(**inputs, seed=no_dropout, logits_at=at.to(device))
            best = logits.float().softmax(-1).topk(min(SAMPLE_WORDS, logits.shape[1]))
            words = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            for sample in without:
                masks = [mask | {"predicted": self._words(*next(words))} for mask in sample["masks"]]
                samples.append(sample | {"masks": masks})
        return samples

    def _words(self, probabilities: list[float], ids: list[int]) -> list[list[Any]]:
        return [[self._vocabulary[i], round(p, 4)] for p, i in zip(probabilities, ids, strict=True)]


def readable(batches: Iterable[Batch], progress: Callable[[], None], problems: list[Exception]) -> Iterator[Batch]:
    """`batches` up to one that cannot be read. Its error goes to `problems`, to be raised later: other ranks are in a collective."""
    try:
        for batch in batches:
            yield batch
            progress()
    except (ValueError, OSError) as error:
        problems.append(error)

"""Minimal pairs: the share of pairs, differing in one point of grammar, whose acceptable sentence is likelier.

A masked model's score of a sentence is its pseudo-log-likelihood: the sum over tokens of the log-probability of a token when only it
is masked (Salazar et al. 2020, Masked Language Model Scoring). A causal model's is the sentence's log-likelihood.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from megabert.config import Config
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.ranks import World
from megabert.hf import Pretrained, tokenizer_export
from megabert.hf.inference import on_every_core, one_row, pack_weights
from megabert.hf.packing import groups, pack, pack_line
from megabert.hf.unknown_tokens import UnknownTokens
from megabert.model import evaluating
from megabert.objectives.pairs import Pair

# tokens of masked copies in a batch, on the CPU for each core
BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}


class Span(NamedTuple):
    """Tokens of a sentence, by its index, that a batch predicts: from `first`, after [CLS], to the one before `end`."""

    sentence: int
    first: int
    end: int


class SentenceScorer:
    """Scores of spans of sentences by a model: log-likelihoods (natural logarithms), pseudo-log-likelihoods of a masked model."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        tokenizer: Tokenizer,
        device: torch.device,
        *,
        line: bool,
        causal: bool | None = None,
    ) -> None:
        """`model`: a `BertForPreTraining` or a callable like it; `line`: batches are one row without padding; `causal`: scores are
        log-likelihoods, by default if the model is trained so."""
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.causal = config.data.masking.causal if causal is None else causal
        self.most = config.model.max_positions
        self._pack = pack_line if line else pack

    def encode(self, sentences: Sequence[str]) -> list[np.ndarray]:
        """int32 [n] each, with [CLS] and [SEP]. Raises ValueError for an empty sentence and one longer than the model's positions."""
        tokenizer, encoded = self.tokenizer, tokenizer_export.encode(self.tokenizer, sentences)
        for sentence, ids in zip(sentences, encoded, strict=True):
            if not 0 < len(ids) <= self.most - 2:
                raise ValueError(f"{sentence[:60]!r} has {len(ids)} tokens; the model scores 1 to {self.most - 2}")
        UnknownTokens(tokenizer).add(encoded).warn("the minimal pairs")
        return [np.array([tokenizer.cls_id, *ids, tokenizer.sep_id], np.int32) for ids in encoded]

    def jobs(self, encoded: Sequence[np.ndarray]) -> list[list[Span]]:
        """The spans of each batch. The masked copies of a long sentence are in several."""
        most, spans, work = BATCH_TOKENS[self.device.type], [], []
        for sentence, ids in enumerate(encoded):
            end = len(ids) - 1
            step = end if self.causal else max(1, most // len(ids))
            for first in range(1, end, step):
                spans.append(Span(sentence, first, min(first + step, end)))
                work.append(len(ids) * (1 if self.causal else spans[-1].end - first))
        return [[spans[i] for i in group] for group in groups(work, most)]

    @torch.no_grad()
    def score(self, encoded: Sequence[np.ndarray], job: Sequence[Span]) -> np.ndarray:
        """fp64 [n] of the spans of a job, whose sentences are in `encoded`."""
        sentences, counts = [encoded[span.sentence] for span in job], [span.end - span.first for span in job]
        at = np.concatenate([np.arange(span.first, span.end) for span in job])  # (N), in their sentences
        tokens = [ids[span.first : span.end] for ids, span in zip(sentences, job, strict=True)]
        labels = torch.from_numpy(np.concatenate(tokens)).long().to(self.device)  # (N)
        copies = sentences
        if not self.causal:
            copies = [copy for ids, span in zip(sentences, job, strict=True) for copy in self._masked(ids, span)]
        packed = self._pack(copies, [len(ids) for ids in copies], causal=self.causal)
        # a causal model predicts a token at the position before it
        at += np.repeat(packed.starts, counts) - 1 if self.causal else packed.starts
        no_dropout = torch.zeros(1, dtype=torch.int64, device=self.device)
        inputs = packed.to(self.device).inputs() | {
            "seed": no_dropout,
            "logits_at": torch.from_numpy(at).to(self.device),
            "causal": self.causal,
        }
        values = self.model(**inputs).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]  # (N)
        return np.add.reduceat(values.double().cpu().numpy(), np.cumsum([0, *counts[:-1]]))

    def _masked(self, ids: np.ndarray, span: Span) -> np.ndarray:
        """[T] -> [n, T]: copies with one token of the span masked each."""
        n = span.end - span.first
        copies = np.tile(ids, (n, 1))
        copies[np.arange(n), np.arange(span.first, span.end)] = self.tokenizer.mask_id
        return copies


def score_sentences(
    pretrained: Pretrained, sentences: Sequence[str], precision: torch.dtype = torch.float32, causal: bool | None = None
) -> np.ndarray:
    """fp64 [n], in their order, on a GPU where there is one; shows progress. `causal`: as in `SentenceScorer`. Raises ValueError as
    `SentenceScorer.encode`, for a Hugging Face folder without weights of a language model, and for a score that is not finite."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = pretrained.language_model(device, precision)
    pack_weights(model)
    scorer = SentenceScorer(model, pretrained.config, pretrained.tokenizer, device, line=one_row(model), causal=causal)
    encoded, scores = scorer.encode(sentences), np.zeros(len(sentences))

    def compute(job: list[Span]) -> tuple[list[Span], np.ndarray]:
        return job, scorer.score(encoded, job)

    bar = tqdm(total=len(sentences), unit=" sentences", disable=None, leave=False)
    with bar, closing(on_every_core(compute, scorer.jobs(encoded), device)) as computed:
        for job, values in computed:
            np.add.at(scores, [span.sentence for span in job], values)
            bar.update(sum(span.first == 1 for span in job))
    for sentence, score in zip(sentences, scores.tolist(), strict=True):
        if not math.isfinite(score):
            raise ValueError(f"{pretrained.run_dir}: its score of {sentence[:60]!r} is {score}; name another model")
    return scores


class PairsWhileTraining:
    """Minimal pairs under a model in training; each rank scores its share of the sentences."""

    def __init__(self, pairs: Sequence[Pair], scorer: SentenceScorer, world: World) -> None:
        self.pairs, self.scorer, self.world = pairs, scorer, world
        self.sentences = list_sentences(pairs)
        self.encoded = scorer.encode(self.sentences)

    def evaluate(self, progress: Callable[[], None]) -> dict[str, float]:
        """`eval/pairs_accuracy`, and of each field `eval/pairs_FIELD`. Leaves train/eval as it was. A collective. At ZeRO stage 3
        each batch is one too, so all ranks have the same number."""
        model, jobs = self.scorer.model, self.scorer.jobs(self.encoded)
        rank_jobs = jobs[self.world.rank :: self.world.size]
        # ranks with fewer jobs repeat their first one, with the same result
        rank_jobs += jobs[:1] * (-(-len(jobs) // self.world.size) - len(rank_jobs))
        scored: list[tuple[Span, float]] = []
        with evaluating(model):
            for job in rank_jobs:
                scored += zip(job, self.scorer.score(self.encoded, job).tolist(), strict=True)
                progress()
        spans = {Span(*span): score for of_rank in self.world.gather(scored) for span, score in of_rank}
        scores = dict.fromkeys(self.sentences, 0.0)
        for span, score in sorted(spans.items()):
            scores[self.sentences[span.sentence]] += score
        table = build_table(self.pairs, scores)
        fields = {"eval/pairs_" + re.sub(r"[\W_]+", "_", field): value for field, value in table["fields"].items()}
        return {"eval/pairs_accuracy": table["accuracy"]} | fields


def list_sentences(pairs: Sequence[Pair]) -> list[str]:
    """The distinct sentences of pairs."""
    return sorted({sentence for pair in pairs for sentence in (pair.good, pair.bad)})


def build_table(pairs: Sequence[Pair], scores: dict[str, float]) -> dict[str, Any]:
    """How often the acceptable sentence of a pair has the higher score: {"accuracy", "pairs", "ties", "fields": {name: accuracy},
    "paradigms": {name, or FIELD/name if several fields have it: {"field", "pairs", "accuracy"}}}. A tie counts half. A field is the mean of its paradigms, `accuracy` the mean
    of all paradigms, as in BLiMP."""
    outcomes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for pair in pairs:
        good, bad = scores[pair.good], scores[pair.bad]
        # NaN if either is
        outcomes[pair.field, pair.paradigm].append(float(0.5 + 0.5 * np.sign(good - bad)))
    fields_of = Counter(paradigm for _, paradigm in outcomes)
    paradigms: dict[str, dict[str, Any]] = {
        paradigm if fields_of[paradigm] == 1 else f"{field}/{paradigm}": {
            "field": field,
            "pairs": len(results),
            "accuracy": fmean(results),
        }
        for (field, paradigm), results in sorted(outcomes.items())
    }
    fields: dict[str, list[float]] = defaultdict(list)
    for values in paradigms.values():
        fields[values["field"]].append(values["accuracy"])
    return {
        "accuracy": fmean(values["accuracy"] for values in paradigms.values()),
        "pairs": len(pairs),
        "ties": sum(results.count(0.5) for results in outcomes.values()),
        "fields": {field: fmean(values) for field, values in fields.items()},
        "paradigms": paradigms,
    }


def score_pairs(
    pretrained: Pretrained, pairs: Sequence[Pair], precision: torch.dtype = torch.float32, causal: bool | None = None
) -> dict[str, Any]:
    """`build_table` for a model; each distinct sentence is scored once. Arguments and errors as of `score_sentences`."""
    sentences = list_sentences(pairs)
    scores = score_sentences(pretrained, sentences, precision, causal)
    return build_table(pairs, dict(zip(sentences, scores.tolist(), strict=True)))

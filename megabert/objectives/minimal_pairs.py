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
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from megabert.config import Config
from megabert.data.packing import groups, pack, pack_line
from megabert.data.pairs import Pair
from megabert.data.tokenizer import Tokenizer, UnknownTokens
from megabert.distributed.ranks import World
from megabert.hf import Pretrained, tokenizer_files
from megabert.hf.inference import on_every_core, one_row, pack_weights
from megabert.model import evaluating

# tokens of masked copies in a batch, on the CPU for each core
BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}


class SentenceScorer:
    """Scores of sentences by a model: log-likelihoods (natural logarithms), pseudo-log-likelihoods of a masked model."""

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
        tokenizer, encoded = self.tokenizer, tokenizer_files.encode(self.tokenizer, sentences)
        for sentence, ids in zip(sentences, encoded, strict=True):
            if not 0 < len(ids) <= self.most - 2:
                raise ValueError(f"{sentence[:60]!r} has {len(ids)} tokens; the model scores 1 to {self.most - 2}")
        UnknownTokens(tokenizer).add(encoded).warn("the minimal pairs")
        return [np.array([tokenizer.cls_id, *ids, tokenizer.sep_id], np.int32) for ids in encoded]

    def jobs(self, encoded: Sequence[np.ndarray]) -> list[list[int]]:
        """Indices of the sentences of each batch."""
        work = [len(ids) * (1 if self.causal else len(ids) - 2) for ids in encoded]
        return groups(work, BATCH_TOKENS[self.device.type])

    @torch.no_grad()
    def score(self, sentences: Sequence[np.ndarray]) -> np.ndarray:
        """fp64 [n] of encoded sentences."""
        labels = torch.from_numpy(np.concatenate([ids[1:-1] for ids in sentences])).long().to(self.device)  # (N)
        copies = list(sentences) if self.causal else [copy for ids in sentences for copy in self._masked(ids)]
        packed = self._pack(copies, [len(ids) for ids in copies], causal=self.causal)
        if self.causal:  # a token is predicted at the position before it
            spans = zip(packed.starts, sentences, strict=True)
            at = np.concatenate([np.arange(start, start + len(ids) - 2) for start, ids in spans])
        else:
            at = packed.starts + np.concatenate([np.arange(1, len(ids) - 1) for ids in sentences])
        no_dropout = torch.zeros(1, dtype=torch.int64, device=self.device)
        inputs = packed.to(self.device).inputs() | {
            "seed": no_dropout,
            "logits_at": torch.from_numpy(at).to(self.device),
            "causal": self.causal,
        }
        values = self.model(**inputs).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]  # (N)
        first = np.cumsum([0, *(len(ids) - 2 for ids in sentences[:-1])])
        return np.add.reduceat(values.double().cpu().numpy(), first)

    def _masked(self, ids: np.ndarray) -> np.ndarray:
        """[n + 2] -> [n, n + 2]: copies with one token masked each."""
        n = len(ids) - 2
        copies = np.tile(ids, (n, 1))
        copies[np.arange(n), np.arange(1, n + 1)] = self.tokenizer.mask_id
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

    def compute(job: list[int]) -> list[int]:
        scores[job] = scorer.score([encoded[i] for i in job])
        return job

    bar = tqdm(total=len(sentences), unit=" sentences", disable=None, leave=False)
    with bar, closing(on_every_core(compute, scorer.jobs(encoded), device)) as computed:
        for job in computed:
            bar.update(len(job))
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
        scored: list[tuple[int, float]] = []
        with evaluating(model):
            for job in rank_jobs:
                scored += zip(job, self.scorer.score([self.encoded[i] for i in job]).tolist(), strict=True)
                progress()
        scores = {self.sentences[i]: score for part in self.world.gather(scored) for i, score in part}
        table = build_table(self.pairs, scores)
        fields = {
            f"eval/pairs_{re.sub('[^a-zA-Z0-9]+', '_', field)}": value for field, value in table["fields"].items()
        }
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

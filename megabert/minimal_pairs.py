"""Minimal pairs: how often a model finds the right one of two sentences that differ in one point of grammar likelier.

A masked model's score of a sentence is its pseudo-log-likelihood: the sum, over the tokens, of a token's log-probability where
it alone is masked (Salazar et al. 2020, Masked Language Model Scoring). A causal model's is the sentence's log-likelihood.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megabert.common.streaming import in_order
from megabert.data.packing import groups, pack, pack_line
from megabert.hf import Pretrained
from megabert.hf.inference import one_thread, pack_weights, threads_apart, workers

# tokens of masked copies computed at once, on the CPU by each core
BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}


class Pair(NamedTuple):
    """Two sentences, of which the first is right; `paradigm`: what they differ in, `field`: the paradigms it belongs to."""

    good: str
    bad: str
    paradigm: str
    field: str


def read_pairs(source: str | Path, each: int = 0) -> list[Pair]:
    """The pairs of a file, or of all .jsonl and .txt files below a folder; with `each` the first so many of each paradigm.

    .jsonl, BLiMP's format (Warstadt et al. 2020): `sentence_good`, `sentence_bad` and, if there, `UID` and `field`, by default
    the file's name. .txt, Zorro's (Huebner et al. 2021): lines in pairs, the wrong sentence first, in a file PARADIGM's name
    FIELD-PARADIGM.txt. Raises ValueError naming file and line.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for ending in READERS for file in path.rglob(f"*{ending}"))
    else:
        files = [path]
    if not files or any(file.suffix not in READERS for file in files):
        raise ValueError(f"{path}: neither a {' or '.join(READERS)} file nor a folder of such files")
    kept: dict[str, list[Pair]] = defaultdict(list)
    for file in files:
        for pair in READERS[file.suffix](file):
            if not each or len(kept[pair.paradigm]) < each:
                kept[pair.paradigm].append(pair)
    pairs = [pair for paradigm in kept.values() for pair in paradigm]
    if not pairs:
        raise ValueError(f"{path}: has no pair in it")
    return pairs


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with open(file, encoding="utf-8") as lines:
        try:
            yield from ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: is not UTF-8 ({error.reason}); convert it") from None


def _read_jsonl(file: Path) -> Iterator[Pair]:
    for number, line in _lines(file):
        try:
            values = json.loads(line)
            good, bad = values["sentence_good"], values["sentence_bad"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number}: no object with sentence_good and sentence_bad ({error})"
            ) from None
        yield Pair(good, bad, str(values.get("UID", file.stem)), str(values.get("field", file.stem)))


def _read_txt(file: Path) -> Iterator[Pair]:
    lines = [line for _, line in _lines(file)]
    if len(lines) % 2:
        raise ValueError(
            f"{file}: has {len(lines)} lines, which are no pairs; the wrong sentence stands before the right one"
        )
    field = file.stem.rpartition("-")[0] or file.stem
    yield from (Pair(good, bad, file.stem, field) for bad, good in zip(lines[::2], lines[1::2], strict=True))


READERS = {".jsonl": _read_jsonl, ".txt": _read_txt}


class SentenceScorer:
    """A model as a function from sentences to log-likelihoods; a masked model's are pseudo-log-likelihoods."""

    def __init__(self, pretrained: Pretrained, precision: torch.dtype = torch.float32) -> None:
        """Raises ValueError for a Hugging Face folder whose weights are no language model's."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer = pretrained.language_model(self.device, precision), pretrained.tokenizer
        pack_weights(self.model)
        self.causal, self.most = pretrained.config.data.masking.causal, pretrained.config.model.max_positions
        self.line = self.device.type == "cpu" and self.model.backends.attention.name == "native"

    def score(self, sentences: Sequence[str]) -> np.ndarray:
        """fp64 [n], natural logarithms. Shows progress. Raises ValueError for an empty sentence and one longer than the model's positions."""
        encoded = self.tokenizer.encode_texts(sentences)
        for sentence, ids in zip(sentences, encoded, strict=True):
            if not 0 < len(ids) <= self.most - 2:
                raise ValueError(f"{sentence[:60]!r} has {len(ids)} tokens; the model scores 1 to {self.most - 2}")
        copies = [1 if self.causal else len(ids) for ids in encoded]
        work = [n * (len(ids) + 2) for n, ids in zip(copies, encoded, strict=True)]
        jobs = groups(work, BATCH_TOKENS[self.device.type])
        scores = np.zeros(len(sentences))
        threads = workers(self.device)
        computed = in_order(lambda job: self._job(encoded, job), iter(jobs), threads, 2 * threads, one_thread)
        with (
            threads_apart(),
            closing(computed),
            tqdm(total=len(sentences), unit=" sentences", disable=None, leave=False) as bar,
        ):
            for job, values in computed:
                scores[job] = values
                bar.update(len(job))
        return scores

    def _job(self, encoded: Sequence[Sequence[int]], job: list[int]) -> tuple[list[int], np.ndarray]:
        """The scores of the sentences `job`, fp64 [n]."""
        ids = [np.array([self.tokenizer.cls_id, *encoded[i], self.tokenizer.sep_id], np.int32) for i in job]
        values = self._log_probabilities(ids).double().cpu().numpy()  # of all tokens of all sentences
        return job, np.add.reduceat(values, np.cumsum([0, *(len(one) - 2 for one in ids[:-1])]))

    @torch.no_grad()
    def _log_probabilities(self, sentences: Sequence[np.ndarray]) -> Tensor:
        """fp32 [N] of the tokens between [CLS] and [SEP], of one sentence after the other."""
        labels = torch.from_numpy(np.concatenate([ids[1:-1] for ids in sentences])).long().to(self.device)  # (N)
        copies = list(sentences) if self.causal else [copy for ids in sentences for copy in self._masked(ids)]
        packed = (pack_line if self.line else pack)(copies, [len(ids) for ids in copies], causal=self.causal)
        if self.causal:  # a token is predicted at the one before it
            spans = zip(packed.starts, sentences, strict=True)
            at = np.concatenate([np.arange(start, start + len(ids) - 2) for start, ids in spans])
        else:
            at = packed.starts + np.concatenate([np.arange(1, len(ids) - 1) for ids in sentences])
        seed = torch.zeros(1, dtype=torch.int64, device=self.device)
        keep = torch.from_numpy(at).to(self.device)
        logits = self.model.mlm_logits(
            self.model.encode(**packed.to(self.device).inputs(), keep=keep, seed=seed)
        )  # (N, V)
        return logits.float().log_softmax(-1).gather(1, labels[:, None])[:, 0]

    def _masked(self, ids: np.ndarray) -> np.ndarray:
        """[n + 2] -> [n, n + 2]: copies with one token masked each."""
        n = len(ids) - 2
        copies = np.tile(ids, (n, 1))
        copies[np.arange(n), np.arange(1, n + 1)] = self.tokenizer.mask_id
        return copies


def table_of(pairs: Sequence[Pair], scores: dict[str, float]) -> dict[str, Any]:
    """How often the right sentence of a pair has the higher score: {"accuracy", "pairs", "ties", "fields": {name: accuracy},
    "paradigms": {name: {"field", "pairs", "accuracy"}}}. A tie counts half; a field is the mean of its paradigms, and `accuracy` is
    the mean of all paradigms, as BLiMP has it."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for pair in pairs:
        good, bad = scores[pair.good], scores[pair.bad]
        found[pair.field, pair.paradigm].append(1.0 if good > bad else 0.5 if good == bad else 0.0)
    paradigms: dict[str, dict[str, Any]] = {
        paradigm: {"field": field, "pairs": len(results), "accuracy": fmean(results)}
        for (field, paradigm), results in sorted(found.items())
    }
    fields: dict[str, list[float]] = defaultdict(list)
    for values in paradigms.values():
        fields[values["field"]].append(values["accuracy"])
    return {
        "accuracy": fmean(values["accuracy"] for values in paradigms.values()),
        "pairs": len(pairs),
        "ties": sum(results.count(0.5) for results in found.values()),
        "fields": {field: fmean(values) for field, values in fields.items()},
        "paradigms": paradigms,
    }


def score_pairs(
    pretrained: Pretrained, pairs: Sequence[Pair], precision: torch.dtype = torch.float32
) -> dict[str, Any]:
    """`table_of` a model; each different sentence is scored once. Raises ValueError as `SentenceScorer` does."""
    sentences = sorted({sentence for pair in pairs for sentence in (pair.good, pair.bad)})
    scores = SentenceScorer(pretrained, precision).score(sentences)
    return table_of(pairs, dict(zip(sentences, scores.tolist(), strict=True)))

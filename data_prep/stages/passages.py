"""Held-out passages, for a corpus with too few documents to hold out whole ones.

A document is cut into passages of about equal length, at sentence ends. Those with the smallest hashes of their tokens are held
out, so that equal passages are in the same part for any number of workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import range_indices, segment_counts, segment_hashes
from data_prep.common.errors import counted
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import BuildJob, ItemResult, job_tokenizer, total
from data_prep.stages.kept import KeptDocuments
from data_prep.tokens.encoder import Encoded
from megabert.common.logs import log

# whole documents are held out only if at least so many are, with --held-out's share of tokens up to this factor
FEWEST_DOCUMENTS, MAX_DEVIATION = 5, 2
# tokens of a passage; fewer, down to LEAST, if a passage would exceed the share
TOKENS, LEAST = 1024, 128


def needs_passages(share: float, read: ItemResult) -> bool:
    """Whether held-out documents would be too few, or miss `share` by too much. `read`: totals of reading."""
    asked = share * (read.counts["tokens read"] - read.counts["dropped tokens"])
    fits = asked / MAX_DEVIATION <= read.counts["held-out tokens"] <= asked * MAX_DEVIATION
    return share > 0 and not (fits and read.counts["held-out documents"] >= FEWEST_DOCUMENTS)


def run(
    stages: Stages, job: BuildJob, kept: list[KeptDocuments], documents: list[ItemResult]
) -> tuple[BuildJob, list[KeptDocuments]]:
    """Choose passages if they are needed; returns the job with their size and limit, and the documents with their held-out tokens.

    Nothing is held out of a text of a single passage, or if less than the longest row would remain.
    """
    share, read = job.options.held_out, total(documents)
    if not needs_passages(share, read):
        return job, kept
    tokens = read.counts["tokens read"] - read.counts["dropped tokens"]
    job = replace(job, passage=min(TOKENS, max(LEAST, int(share * tokens))), held_limit=0)
    found = stages.map("passages", find, job, kept)
    by_task = [np.array(result.facts["passages"], np.uint64).reshape(-1, 2) for result in found]
    hashes, sizes = np.concatenate(by_task).T
    distinct, place = np.unique(hashes, return_inverse=True)
    reached = np.cumsum(np.bincount(place, sizes.astype(np.int64)))
    last = int(np.abs(reached[:-1] - share * reached[-1]).argmin()) if len(distinct) > 1 else -1
    if last >= 0 and reached[-1] - reached[last] >= max(job.options.seq_len):
        job = replace(job, held_limit=int(distinct[last]) + 1)
        passages, whole = int((hashes < job.held_limit).sum()), read.counts["held-out documents"]
        log.info(
            f"held out: {counted(passages, 'passages')} of about {job.passage:,} tokens, "
            f"{reached[last] / reached[-1]:.2%} of the text; passages, since by whole documents it would be "
            f"{counted(whole, 'documents')}, {read.counts['held-out tokens'] / tokens:.2%}"
        )
    held = [int(of_task[of_task[:, 0] < job.held_limit, 1].sum()) for of_task in by_task]
    return job, [replace(part, held_tokens=tokens) for part, tokens in zip(kept, held, strict=True)]


def find(job: BuildJob, part: KeptDocuments) -> ItemResult:
    """The fact "passages" of a task: hash and tokens of each."""
    passages: list[list[int]] = []
    for _, unit in part.load(job):
        edges, hashes = _cut(job, unit)
        passages += np.stack([hashes, np.diff(edges).astype(np.uint64)], axis=1).tolist()
    return ItemResult(facts={"passages": passages})


class Segments(NamedTuple):
    """Documents as segments, each held out or not. [g]: document, number of sentences that begin in it, bytes, whether held out."""

    encoded: Encoded
    document: np.ndarray
    sentences: np.ndarray
    bytes: np.ndarray
    held: np.ndarray


def split(job: BuildJob, table: np.ndarray, unit: Encoded) -> Segments:
    """The segments of a unit: whole documents, or held-out passages and the runs of text between them."""
    if not job.passage:
        held = table["hash"] < job.held_limit
        return Segments(unit, np.arange(len(table)), unit.document_sizes, table["bytes"], held)
    edges, hashes = _cut(job, unit)
    ends, held = np.cumsum(unit.document_tokens()), hashes < job.held_limit
    document = np.searchsorted(ends, edges[:-1], side="right")
    begins = np.ones(len(held), bool)
    begins[1:] = (np.diff(document) > 0) | held[1:] | held[:-1]
    edges = np.append(edges[:-1][begins], len(unit.tokens))
    document, held = document[begins], held[begins]
    starts = np.cumsum(unit.sentence_lengths) - unit.sentence_lengths
    parts = np.union1d(starts, edges[:-1])
    encoded = Encoded(unit.tokens, np.diff(parts, append=len(unit.tokens)), segment_counts(parts, edges))
    share = np.diff(edges) / unit.document_tokens()[document]
    size = np.rint(table["bytes"][document] * share).astype(np.int64)
    return Segments(encoded, document, segment_counts(starts, edges), size, held)


def _cut(job: BuildJob, unit: Encoded) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [p + 1]: edges in tokens of the passages of all documents, uint64 [p]: their hashes).

    A passage ends at the first sentence end after its size; if none is near, before a word.
    """
    size, tokens = job.passage, unit.document_tokens()
    first = np.cumsum(tokens) - tokens
    cuts = np.maximum(tokens // size - 1, 0)  # passages of each document, of which the last is the longest
    at = np.repeat(first, cuts) + range_indices(1, cuts) * size
    ends = np.cumsum(unit.sentence_lengths)
    sentence = ends[np.searchsorted(ends, at)]
    begins = job_tokenizer(job).word_start[unit.tokens]
    word = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))[at]
    word = np.where(word > at - size // 2, word, at)
    at = np.where(sentence < at + size // 2, sentence, word)
    edges = np.sort(np.concatenate([first[tokens > 0], at, [len(unit.tokens)]]))
    return edges, segment_hashes(unit.tokens, edges, job.options.seed)

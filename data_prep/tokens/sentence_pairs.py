"""Sentence pairs, and full sentences, as ranges of a unit's tokens; no token is copied until all are chosen.

BERT's algorithm. Source: Devlin et al. 2019, appendix A.2: sentences gather up to a target length, which is the row's in 90%
of the cases and uniform in [2, row] in 10%; a random point among them ends A; in half of the cases (and
always when there is one sentence alone) B is a run of another document from a random sentence on, and the
sentences that were to be B are put back. The longer of A and B then loses tokens, each from its front or
its end by a fair coin, until both fit. The target is drawn for each sequence, not once a document, so that
one unlucky long document does not become thousands of short sequences.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from data_prep.tokens.encoder import Encoded

PAIR_SPECIALS = 3  # [CLS] A [SEP] B [SEP]
SINGLE_SPECIALS = 2  # [CLS] A [SEP]
_DRAWS = 4096


@dataclass
class Ranges:
    """n sequences: half-open token ranges of A and B, int64 [n, 4]; label int8 [n]: 0 next, 1 random, -1 no B.

    Every token is in one A or one true B before truncation: sum of spans = tokens + borrowed - truncated.
    """

    spans: np.ndarray
    labels: np.ndarray
    borrowed: int = 0  # tokens of random Bs before truncation
    truncated: int = 0


def _document_edges(encoded: Encoded, halve: bool) -> list[int]:
    """Sentence numbers where documents begin, and the end; a lone document counts as two halves."""
    sizes = encoded.document_sizes[encoded.document_sizes > 0]
    edges = [0, *np.cumsum(sizes).tolist()]
    if halve and len(edges) == 2 and edges[1] > 1:
        edges.insert(1, edges[1] // 2)
    return edges


def sentence_pairs(encoded: Encoded, capacity: int, short_share: float, rng: np.random.Generator) -> Ranges:
    """A and B of each sequence, truncated to `capacity` tokens together.

    B of a random pair comes from another document among `encoded`; where that is a single one it is taken as
    two halves, and where it is a single sentence B is that sentence again.
    """
    edges = _document_edges(encoded, halve=True)
    at = [0, *np.cumsum(encoded.sentence_lengths).tolist()]  # token offset of each sentence
    documents = len(edges) - 1
    rows: list[tuple[int, int, int, int]] = []
    labels: list[int] = []
    draws: list[list[float]] = []
    for d in range(documents):
        i, end = edges[d], edges[d + 1]
        while i < end:
            if not draws:
                draws = rng.random((_DRAWS, 6)).tolist()
            short, target_draw, split, coin, other_draw, start_draw = draws.pop()
            target = capacity if short >= short_share else 2 + int(target_draw * (capacity - 1))
            stop = bisect_left(at, at[i] + target, i + 1, end)
            gathered = stop - i
            a_end = i + 1 if gathered < 2 else i + 1 + int(split * (gathered - 1))
            if gathered == 1 or coin < 0.5:
                other = 0
                if documents > 1:
                    other = int(other_draw * (documents - 1))
                    other += other >= d
                low, high = edges[other], edges[other + 1]
                b_start = low + int(start_draw * (high - low))
                b_end = bisect_left(at, at[b_start] + target - (at[a_end] - at[i]), b_start + 1, high)
                rows.append((at[i], at[a_end], at[b_start], at[b_end]))
                labels.append(1)
                i = a_end
            else:
                rows.append((at[i], at[a_end], at[a_end], at[stop]))
                labels.append(0)
                i = stop
    spans = np.array(rows, np.int64).reshape(-1, 4)
    isnext = np.array(labels, np.int8)
    borrowed = int((spans[:, 3] - spans[:, 2])[isnext == 1].sum())
    return Ranges(spans, isnext, borrowed, _truncate(spans, capacity, rng))


def _truncate(spans: np.ndarray, capacity: int, rng: np.random.Generator) -> int:
    """Shorten A and B in place as one token at a time from the longer (B when equal) would, in closed form.

    Returns the number of tokens cut off.
    """
    length_a, length_b = spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]
    excess = np.maximum(length_a + length_b - capacity, 0)
    from_longer = np.minimum(excess, np.abs(length_a - length_b))
    rest = excess - from_longer
    cut_a = np.where(length_a > length_b, from_longer, 0) + rest // 2
    cut_b = np.where(length_a > length_b, 0, from_longer) + (rest + 1) // 2
    front_a, front_b = rng.binomial(cut_a, 0.5), rng.binomial(cut_b, 0.5)
    spans += np.stack([front_a, front_a - cut_a, front_b, front_b - cut_b], axis=1)
    return int(excess.sum())


def filled_rows(
    encoded: Encoded, capacity: int, short_share: float, word_start: np.ndarray, rng: np.random.Generator
) -> Ranges:
    """Runs of `capacity` tokens inside documents, cut before a word wherever that is; nothing is dropped.

    The next run goes on with the word after the cut (RoBERTa's full sentences, Liu et al. 2019, but with rows of 128 filled:
    ending at sentences they lose half a sentence each). A share of them stops at a shorter, uniform length, at the end
    of a sentence where one fits. `word_start` is bool [vocab_size]; a word of more than a
    sixteenth of a row is cut.
    """
    edges = _document_edges(encoded, halve=False)
    at = [0, *np.cumsum(encoded.sentence_lengths).tolist()]
    places = np.arange(len(encoded.tokens) + 1)
    begins = np.append(word_start[encoded.tokens], True)
    word = np.maximum.accumulate(np.where(begins, places, 0)).tolist()  # first token of the word at each place
    rows: list[tuple[int, int, int, int]] = []
    draws: list[list[float]] = []
    for d in range(len(edges) - 1):
        position, end = at[edges[d]], at[edges[d + 1]]
        while position < end:
            if not draws:
                draws = rng.random((_DRAWS, 2)).tolist()
            short, target_draw = draws.pop()
            if short < short_share:
                target = 2 + int(target_draw * (capacity - 1))
                stop = at[bisect_right(at, position + target, edges[d], edges[d + 1] + 1) - 1]
            else:
                target, stop = capacity, position
            if stop <= position:
                stop = min(position + target, end)
                if stop < end and word[stop] > max(position, stop - capacity // 16):
                    stop = word[stop]
            rows.append((position, stop, 0, 0))
            position = stop
    spans = np.array(rows, np.int64).reshape(-1, 4)
    return Ranges(spans, np.full(len(spans), -1, np.int8))


def assemble(
    tokens: np.ndarray, ranges: Ranges, order: np.ndarray, cls_id: int, sep_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write the chosen sequences out in `order` [n].

    Returns flat ids [sum of lengths], lengths int64 [n], and lengths of their `[CLS] A [SEP]` parts int64 [n].
    """
    spans, labels = ranges.spans[order], ranges.labels[order]
    length_a, length_b = spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]
    first = length_a + 2
    lengths = first + np.where(labels >= 0, length_b + 1, 0)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    flat = np.empty(int(lengths.sum()), tokens.dtype)
    ordinary = np.ones(len(flat), bool)
    for position, special in ((begins, cls_id), (begins + first - 1, sep_id), (ends - 1, sep_id)):
        flat[position] = special
        ordinary[position] = False
    assert len(tokens) < 1 << 31, "32-bit places"
    sizes = np.stack([length_a, length_b], axis=1).ravel()
    starts = np.stack([spans[:, 0], spans[:, 2]], axis=1).ravel()
    source = np.repeat((starts - (np.cumsum(sizes) - sizes)).astype(np.int32), sizes)
    source += np.arange(len(source), dtype=np.int32)
    flat[ordinary] = tokens[source]
    return flat, lengths, first

"""Masking of rows: a function of (seed, epoch, row id) and the row, whatever its batch, rank, worker or time.

Random numbers are hashes of (seed, epoch, row id, position), so there is no state to save or share. [CLS], [SEP], padding and
every other special id are neither predicted nor drawn as a replacement. The strategies:

    token  positions drawn one by one                                        (Devlin et al. 2019, section 3.1)
    word   whole words in random order; one that exceeds the budget is skipped             (BERT's whole-word masking);
           in a script without spaces between words, a token is a word
    span   runs of 1 to 10 whole words from random anchors, P(k) ~ 0.2 * 0.8^(k-1)         (Joshi et al. 2020, 3.1)
    causal nothing is hidden or drawn: each position but the last of its sequence predicts the next id, [SEP] included

Budget: a sequence gets rate x (its maskable tokens), rounded so that the row's total is rounded only once and without
bias, and at least 1. A word or span never ends inside a word, with one exception: when no drawn word of a sequence fits
its budget, the first one drawn is masked up to the budget. A run may change strategy and rate: `masking_at`.

Legend: n rows, T row length, S sequences a row, K prediction slots a row, P predictions in all rows, W words in all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megabert.common.random_numbers import stream_keys

if TYPE_CHECKING:
    from megabert.config import Config, MaskingConfig

STRATEGIES = ("token", "word", "span", "causal")
# label of a position without prediction: torch's `ignore_index`, and `kIgnore` of csrc
IGNORE = -100
# 2^32 / golden ratio
GOLDEN32 = 0x9E3779B9
LAST = np.uint32(0xFFFFFFFF)
# first counter of each use of a row's random stream
CHOICE, ACTION, REPLACEMENT, SPAN = (np.uint32(stream << 16) for stream in range(4))
# lengths of spans in words, P(k) truncated at SPAN_MAX and renormalised: mean 3.8
SPAN_MAX, SPAN_P = 10, 0.2
SPAN_CDF = np.cumsum([SPAN_P * (1 - SPAN_P) ** k for k in range(SPAN_MAX)])
SPAN_BELOW = (SPAN_CDF / SPAN_CDF[-1] * 2.0**32)[:-1].astype(np.uint32)
# step of a masking rate that changes: so large that loader workers, which work ahead, seldom have to repeat an update
RATE_STEP = 0.01


@dataclass(frozen=True)
class Masking:
    """What is predicted, and how it is shown: `mask` of the predictions as [MASK], `random` as a random token."""

    strategy: str = "token"
    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    # slots a row; 0 means ceil(rate x T) + 1
    max_predictions: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"masking.strategy must be {', '.join(STRATEGIES)}, is {self.strategy!r}")
        if not 0 < self.rate < 1:
            raise ValueError(f"masking.rate must lie between 0 and 1, is {self.rate}")
        if not (self.mask >= 0 and self.random >= 0 and self.mask + self.random <= 1):
            raise ValueError(f"masking.mask + masking.random must be at most 1, are {self.mask}, {self.random}")

    @staticmethod
    def of(options: Masking | MaskingConfig) -> Masking:
        """The same options, checked."""
        return Masking(options.strategy, options.rate, options.mask, options.random, options.max_predictions)

    @property
    def causal(self) -> bool:
        """Whether a token attends only to the tokens before it and itself."""
        return self.strategy == "causal"

    @property
    def objective(self) -> str:
        """What an update with this masking trains: "causal" or "masked"."""
        return "causal" if self.causal else "masked"

    def capacity(self, seq_len: int) -> int:
        """K, the prediction slots of a row of `seq_len` positions."""
        if self.causal:
            return seq_len
        return min(seq_len, self.max_predictions or math.ceil(self.rate * seq_len) + 1)


def masking_at(config: Config, share: float, seq_len: int) -> Masking:
    """The masking of an update before which `share` of the run's budget was used (0 to 1), in rows of `seq_len` positions.

    A run may begin causal (`objective.causal_share`) and then change its rate from `rate` to `final_rate`
    (`data.masking.final_rate`) in equal steps of about RATE_STEP, both of which last as long as any other. All updates of
    one objective have as many prediction slots: those of the largest rate.
    """
    options, causal_share = config.data.masking, config.objective.causal_share
    masking = Masking.of(options)
    if share < causal_share:
        return replace(masking, strategy="causal")
    if not options.final_rate or masking.causal:
        return masking
    change = options.final_rate - options.rate
    steps = max(1, round(abs(change) / RATE_STEP))
    progress = (share - causal_share) / (1 - causal_share)
    rate = options.rate + change * min(steps, int(progress * (steps + 1))) / steps
    return replace(masking, rate=rate, max_predictions=masked_capacity(config, seq_len))


def masked_capacity(config: Config, seq_len: int) -> int:
    """Prediction slots a row of the updates that are not causal (of all, where all are)."""
    options = config.data.masking
    return replace(Masking.of(options), rate=max(options.rate, options.final_rate)).capacity(seq_len)


def largest_capacity(config: Config, seq_len: int) -> int:
    """The most prediction slots a row of any update."""
    return seq_len if config.causal_updates else masked_capacity(config, seq_len)


def held_out_masking(config: Config) -> Masking:
    """The masking of held-out rows: never causal, unless the whole run is."""
    options = config.data.masking
    return replace(Masking.of(options), rate=config.eval.rate or options.final_rate or options.rate)


class MaskingVocabulary:
    """What masking needs of a tokenizer: its size, [MASK], the special ids and which tokens start a word (bool [vocab];
    `Tokenizer.unit_start`)."""

    def __init__(
        self, size: int, mask_id: int, special_ids: Iterable[int], word_start: np.ndarray | None = None
    ) -> None:
        self.mask_id = mask_id
        self.special = np.zeros(size, dtype=bool)
        self.special[list(special_ids)] = True
        self.last_special = int(np.flatnonzero(self.special)[-1])
        self.ordinary = np.flatnonzero(~self.special).astype(np.uint32)
        self.word_start = word_start
        assert word_start is None or word_start.shape == (size,)
        assert self.special[mask_id] and len(self.ordinary)


@dataclass(frozen=True)
class Masked:
    """Masked rows. `counts` slots of a row are used, the first ones."""

    # int32 [n, T], as the model sees them
    ids: np.ndarray
    # int32 [n, K], ascending in a row, 0 in unused slots
    positions: np.ndarray
    # int64 [n, K], the ids to predict, -100 in unused slots
    labels: np.ndarray
    # int64 [n]
    counts: np.ndarray


def mask(
    ids: np.ndarray,
    bounds: np.ndarray,
    row_ids: np.ndarray,
    *,
    seed: int,
    epoch: int | np.ndarray,
    vocabulary: MaskingVocabulary,
    masking: Masking,
) -> Masked:
    """Mask rows: ids uint16 or uint32 [n, T], bounds [n, S, 2] as stored, row_ids int64 [n], epoch an int or int64 [n].

    The sequences' lengths must sum to at most T in each row, and every id must be below the vocabulary's size.
    """
    n, seq_len = ids.shape
    if masking.causal:
        return _next_tokens(ids, bounds)
    capacity = masking.capacity(seq_len)
    keys = np.broadcast_to(stream_keys(seed, epoch, row_ids), (n,))
    draw = _draw(ids, bounds, keys, masking.rate, capacity, vocabulary)
    if masking.strategy == "token":
        chosen = _choose_tokens(draw)
    else:
        assert vocabulary.word_start is not None, "word and span masking need the table of word starts"
        chosen = _choose_words(draw, vocabulary.word_start[ids], spans=masking.strategy == "span")
    return _replace(ids, chosen, draw, capacity, vocabulary, masking)


def _next_tokens(ids: np.ndarray, bounds: np.ndarray) -> Masked:
    """Causal: every position but the last of its sequence, with the id that follows it."""
    n, seq_len = ids.shape
    lengths = bounds[:, :, 0].astype(np.int64)
    ends = np.cumsum(lengths, axis=1)
    predicts = np.arange(seq_len) < ends[:, -1:]  # (n, T): not padding
    row, sequence = np.nonzero(lengths)
    predicts[row, ends[row, sequence] - 1] = False
    row, position = np.nonzero(predicts)
    counts = predicts.sum(1)
    used = np.arange(seq_len) < counts[:, None]
    positions, labels = np.zeros((n, seq_len), np.int32), np.full((n, seq_len), IGNORE, np.int64)
    positions[used] = position
    labels[used] = ids[row, position + 1]
    return Masked(ids.astype(np.int32), positions, labels, counts)


@dataclass(frozen=True)
class _Draw:
    """What all strategies choose from: every position's random key, and the budget of each sequence."""

    # uint32 [n, T], (sequence, random bits, position) from high to low bits; unsorted
    keys: np.ndarray
    # of the position's bits in a key
    position_mask: np.uint32
    # uint32 [n * T], the high bits of each key: its sequence's number, S in the padding
    sequence: np.ndarray
    sequence_shift: np.uint32
    # int64, flat positions that are never masked, ascending
    special: np.ndarray
    # int64 [n, S] each; a row's budgets sum to at most K
    maskable: np.ndarray
    budget: np.ndarray
    # uint32 [n] each, the halves of the row's key
    low: np.ndarray
    high: np.ndarray

    def first_keys(self, keys: np.ndarray, available: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Flat positions of the first `wanted` of the `available` [n, S] keys of each sequence; keys [n, T] are sorted."""
        n, seq_len = keys.shape
        row_start = np.arange(0, n * seq_len, seq_len)
        first = np.cumsum(available, axis=1) - available + row_start[:, None]
        drawn = keys.ravel()[_runs(first.ravel(), wanted.ravel())] & self.position_mask
        return np.repeat(row_start, wanted.sum(1)) + drawn


def _draw(
    ids: np.ndarray, bounds: np.ndarray, keys: np.ndarray, rate: float, capacity: int, vocabulary: MaskingVocabulary
) -> _Draw:
    n, seq_len = ids.shape
    max_sequences = bounds.shape[1]
    sequence_shift, position_bits = 32 - max_sequences.bit_length(), (seq_len - 1).bit_length()
    if sequence_shift - position_bits < 10:
        raise ValueError(f"rows of {seq_len} tokens with {max_sequences} sequences leave no room for random bits")
    # every position belongs to a sequence or, last, to the padding
    lengths = np.empty((n, max_sequences + 1), np.int64)
    lengths[:, :max_sequences] = bounds[:, :, 0]
    np.subtract(seq_len, lengths[:, :max_sequences].sum(1), out=lengths[:, max_sequences])
    sequence_bits = np.tile(np.arange(max_sequences + 1, dtype=np.uint32) << np.uint32(sequence_shift), n)
    sequence = np.repeat(sequence_bits, lengths.ravel())

    special = np.flatnonzero(ids.ravel() <= vocabulary.last_special)
    special = special[vocabulary.special[ids.ravel()[special]]]
    owner = special // seq_len * (max_sequences + 1) + (sequence[special] >> np.uint32(sequence_shift))
    maskable = (lengths - np.bincount(owner, minlength=lengths.size).reshape(lengths.shape))[:, :max_sequences]

    # One offset a row and differences of floors: each budget is rate x maskable rounded up or down, their sum too.
    total = np.cumsum(maskable, axis=1)
    share = np.minimum(rate, capacity / np.maximum(total[:, -1:], 1))
    offset = (keys >> np.uint64(40)).astype(np.float64)[:, None] / 2.0**24
    budget = _differences((total * share + offset).astype(np.int64))  # truncation is the floor: nothing is negative
    np.maximum(budget, maskable > 0, out=budget)
    budget = _differences(np.minimum(np.cumsum(budget, axis=1), capacity))

    low, high = keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    position, position_mask = np.arange(seq_len, dtype=np.uint32), np.uint32((1 << position_bits) - 1)
    drawn = _hash32(low[:, None], high[:, None], position + CHOICE)
    drawn >>= np.uint32(32 - sequence_shift)
    drawn &= ~position_mask
    drawn |= position
    drawn |= sequence.reshape(n, seq_len)
    return _Draw(drawn, position_mask, sequence, np.uint32(sequence_shift), special, maskable, budget, low, high)


def _hash32(low: np.ndarray, high: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """uint32 random numbers of streams (low, high: the halves of their keys) at `counter`; all three broadcast."""
    x = low + counter * np.uint32(GOLDEN32)
    shifted = x >> np.uint32(16)
    x ^= shifted
    x *= np.uint32(0x7FEB352D)
    x ^= high
    np.right_shift(x, np.uint32(15), out=shifted)
    x ^= shifted
    x *= np.uint32(0x846CA68B)
    np.right_shift(x, np.uint32(16), out=shifted)
    x ^= shifted
    return x


def _differences(total: np.ndarray) -> np.ndarray:
    """Differences along rows [n, S] of running totals, the first from 0."""
    steps = total.copy()
    steps[:, 1:] -= total[:, :-1]
    return steps


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: starts[0], starts[0] + 1, … (counts[0] of them), then those of starts[1], and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def _choose_tokens(draw: _Draw) -> np.ndarray:
    """Flat positions of the predictions, int64 [P], ascending."""
    draw.keys.ravel()[draw.special] = LAST
    draw.keys.sort(axis=1)
    chosen = np.zeros(draw.keys.size, dtype=bool)
    chosen[draw.first_keys(draw.keys, draw.maskable, draw.budget)] = True
    return np.flatnonzero(chosen)


def _choose_words(draw: _Draw, edge: np.ndarray, spans: bool) -> np.ndarray:
    """Flat positions of the predictions, int64 [P], ascending; `edge` bool [n, T] (overwritten): a word may start here."""
    n, seq_len = edge.shape
    max_sequences = draw.budget.shape[1]
    sequence = draw.sequence >> draw.sequence_shift
    word_free = sequence == max_sequences
    word_free[draw.special] = True
    edge = edge.ravel()
    edge |= word_free
    edge[1:] |= word_free[:-1]
    edge[::seq_len] = True
    edges = np.flatnonzero(edge)
    is_word = ~word_free[edges]
    first = edges[is_word]  # [W], flat position of each word's first token
    length = np.diff(edges, append=edge.size)[is_word]
    group = first // seq_len * max_sequences + sequence[first]  # the word's sequence
    budget, left = draw.budget.ravel(), draw.budget.ravel().copy()
    available = np.bincount(group, minlength=n * max_sequences)  # words
    begin = np.cumsum(available) - available

    keys = np.full_like(draw.keys, LAST)
    keys.ravel()[first] = draw.keys.ravel()[first]
    keys.sort(axis=1)
    number = np.empty(edge.size, np.int64)
    number[first] = np.arange(len(first))
    words = available.reshape(n, max_sequences)
    order = number[draw.first_keys(keys, words, words)]  # [W], words of each sequence in the order they are drawn

    taken = np.zeros(len(first), dtype=bool)
    drawn = np.zeros(n * max_sequences, np.int64)  # words drawn so far, a sequence
    if not spans:  # everything before the first word that does not fit, at once
        used = np.cumsum(length[order])
        used -= np.repeat(np.concatenate(([0], used))[begin], available)
        fits = used <= np.repeat(budget, available)
        taken[order[fits]] = True
        drawn = np.bincount(group[order[fits]], minlength=n * max_sequences)
        left -= np.bincount(group[order[fits]], length[order[fits]], n * max_sequences).astype(np.int64)
    span_end = _span_ends(draw, first, length, group) if spans else np.arange(1, len(first) + 1)
    active = np.flatnonzero((left > 0) & (available > drawn))
    while len(active):  # one draw a round in every sequence that has budget and words left
        anchor = order[begin[active] + drawn[active]]
        count = np.where(taken[anchor], 0, span_end[anchor] - anchor)
        candidate, owner = _runs(anchor, count), np.repeat(np.arange(len(active)), count)
        size = np.where(taken[candidate], 0, length[candidate])
        used = np.cumsum(size)
        used -= np.concatenate(([0], used))[(np.cumsum(count) - count)[owner]]
        fits = used <= left[active][owner]
        taken[candidate[fits]] = True
        left[active] -= np.bincount(owner[fits], size[fits], len(active)).astype(np.int64)
        drawn[active] += 1
        active = active[(left[active] > 0) & (available[active] > drawn[active])]

    # the documented exception: where no word fits, the first one is masked up to the budget
    empty = np.flatnonzero((left == budget) & (budget > 0) & (available > 0))
    taken[order[begin[empty]]] = True
    length[order[begin[empty]]] = budget[empty]
    return _runs(first[taken], length[taken])


def _span_ends(draw: _Draw, first: np.ndarray, length: np.ndarray, group: np.ndarray) -> np.ndarray:
    """int64 [W]: one past the last word of the span anchored at each word; a span stays inside its segment."""
    if not len(first):
        return np.zeros(0, np.int64)
    row, position = np.divmod(first, draw.keys.shape[1])
    drawn = _hash32(draw.low[row], draw.high[row], position.astype(np.uint32) + SPAN)
    stops = np.flatnonzero((first[:-1] + length[:-1] != first[1:]) | (group[:-1] != group[1:])) + 1
    stops = np.append(stops, len(first))
    segment_end = np.repeat(stops, np.diff(stops, prepend=0))
    return np.minimum(np.arange(1, len(first) + 1) + np.searchsorted(SPAN_BELOW, drawn, side="right"), segment_end)


def _replace(
    ids: np.ndarray, chosen: np.ndarray, draw: _Draw, capacity: int, vocabulary: MaskingVocabulary, masking: Masking
) -> Masked:
    """Show `chosen` (flat positions, int64 [P], ascending) as [MASK], as a random token or unchanged.

    A row's predictions in random order take golden-ratio steps round the unit circle from a random start, and the angle
    decides. Each single prediction falls in a share with that share's probability, and every row is within about one
    prediction of 80/10/10, where independent draws would spread ten times wider over a corpus.
    """
    n, seq_len = ids.shape
    row = chosen // seq_len
    position = (chosen - row * seq_len).astype(np.uint32)
    counts = np.bincount(row, minlength=n)
    before = np.cumsum(counts) - counts
    slot = np.arange(len(chosen)) - before[row]
    at = row * capacity + slot
    positions, labels = np.zeros((n, capacity), np.int32), np.full((n, capacity), IGNORE, np.int64)
    positions.ravel()[at] = position
    labels.ravel()[at] = ids.ravel()[chosen]

    low, high = draw.low[row], draw.high[row]
    slot_mask = np.uint32((1 << (capacity - 1).bit_length()) - 1)
    shuffled = np.full((n, capacity), LAST)
    shuffled.ravel()[at] = _hash32(low, high, position + ACTION) & ~slot_mask | slot.astype(np.uint32)
    shuffled.sort(axis=1)
    nth = before[row] + (shuffled.ravel()[at] & slot_mask)  # [P], the prediction drawn as the row's slot-th
    angle = _hash32(draw.low, draw.high, np.array([ACTION + np.uint32(0xFFFF)]))[row]
    angle += slot.astype(np.uint32) * np.uint32(GOLDEN32)
    as_mask = angle < np.uint64(round(masking.mask * 2**32))
    as_random = ~as_mask & (angle < np.uint64(round((masking.mask + masking.random) * 2**32)))
    shown = ids.astype(np.int32)
    shown.ravel()[chosen[nth[as_mask]]] = vocabulary.mask_id
    nth = nth[as_random]
    drawn = _hash32(low[nth], high[nth], position[nth] + REPLACEMENT).astype(np.uint64)
    drawn = drawn * np.uint64(len(vocabulary.ordinary)) >> np.uint64(32)
    shown.ravel()[chosen[nth]] = vocabulary.ordinary[drawn]
    return Masked(shown, positions, labels, counts)

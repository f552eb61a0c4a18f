"""Masking of rows: a function of (seed, epoch, row id) and the row, independent of batch, rank, worker and time.

Random numbers are hashes of (seed, epoch, row id, position), so there is no state to save or share. [CLS], [SEP], padding and
every other special id are neither predicted nor drawn as a replacement. The strategies:

    token  positions drawn one by one                                        (Devlin et al. 2019, section 3.1)
    word   whole words in random order, skipping those that exceed the remaining budget (google-research/bert's
           whole-word masking). In scripts without spaces between words a token is a word, see `Tokenizer.unit_start`
    span   the same, in an order in which the words of a span are neighbours: a sequence, as a circle cut anywhere, is divided
           into spans of 1 to 10 words, P(k) ~ 0.2 * 0.8^(k-1), and these are drawn one by one
                                                                (Joshi et al. 2020, arXiv 1907.10529, section 3.1)
    causal nothing is hidden or drawn: each position but the last of its sequence predicts the next id, [SEP] included; with
           `causal_every` only in updates of certain numbers

Budget: a sequence gets rate x (its maskable tokens), rounded so that the row's total is rounded only once and without
bias, and at least 1; in a row with fewer slots some sequences, drawn at random, have less. A special token ends a word. No
word is predicted in part: a sequence of which every word exceeds its budget has no prediction.

Legend: n rows, T row length, S sequences a row, K prediction slots a row, P predictions, W words in all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megabert.common.random_numbers import stream_keys
from megabert.config import Config, MaskingConfig, list_phases, replace

if TYPE_CHECKING:
    from megabert.data.tokenizer import Tokenizer

# label of a position without prediction: torch's `ignore_index`, and `kIgnore` of csrc
IGNORE = -100
# 2^32 / golden ratio
GOLDEN32 = 0x9E3779B9
MAX_UINT32 = np.uint32(0xFFFFFFFF)
# first counter of each use of a row's random stream
CHOICE, ACTION, REPLACEMENT, SPAN = (np.uint32(stream << 16) for stream in range(4))
# words of a span for each 16-bit random number: a geometric distribution without its tail, with a mean of 3.8
SPAN_SHARES = np.cumsum(0.8 ** np.arange(10))
SPAN_WORDS = 1 + np.searchsorted(SPAN_SHARES / SPAN_SHARES[-1], np.arange(1 << 16) / (1 << 16), side="right")


class MaskingVocabulary:
    """What masking needs of a tokenizer: [MASK], the special ids and which tokens begin a word (bool [vocab])."""

    def __init__(self, unit_start: np.ndarray, mask_id: int, special_ids: Iterable[int]) -> None:
        self.unit_start, self.mask_id = unit_start, mask_id
        self.special = np.zeros(len(unit_start), dtype=bool)
        self.special[list(special_ids)] = True
        self.last_special = int(np.flatnonzero(self.special)[-1])
        self.ordinary = np.flatnonzero(~self.special).astype(np.uint32)
        assert self.special[mask_id] and len(self.ordinary)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MaskingVocabulary:
        return cls(tokenizer.unit_start, tokenizer.mask_id, tokenizer.special_ids.values())


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
    masking: MaskingConfig,
) -> Masked:
    """Mask rows: ids uint16 or uint32 [n, T], bounds [n, S, 2] as stored, row_ids int64 [n], epoch an int or int64 [n].

    The sequences' lengths must sum to at most T in each row, and every id must be below the vocabulary's size.
    """
    if masking.causal:
        return _next_tokens(ids, bounds)
    keys = np.broadcast_to(stream_keys(seed, epoch, row_ids), len(ids))
    chosen = _choose(ids, bounds, keys, vocabulary, masking)
    return _replace(ids, chosen, keys, vocabulary, masking)


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


def _choose(
    ids: np.ndarray, bounds: np.ndarray, keys: np.ndarray, vocabulary: MaskingVocabulary, masking: MaskingConfig
) -> np.ndarray:
    """Flat positions of the predictions, int64 [P], ascending; `keys` uint64 [n]: keys of the rows' random streams.

    Each position gets a number of (sequence, random bits, position), from high to low bits. Sorted, a row holds the positions of
    each sequence in random order, of which the first ones are taken.
    """
    n, seq_len = ids.shape
    max_sequences = bounds.shape[1]
    sequence_shift, position_mask = 32 - max_sequences.bit_length(), _position_mask(seq_len)
    if sequence_shift - int(position_mask).bit_length() < 10:
        raise ValueError(
            f"rows of {seq_len} tokens with up to {max_sequences} sequences exceed masking's 32-bit sort keys; "
            "build the dataset with a shorter --seq-len"
        )
    # every position belongs to a sequence or, last, to the padding
    used = bounds[:, :, 0].astype(np.int64)
    lengths = np.column_stack([used, seq_len - used.sum(1)])
    sequence_bits = np.tile(np.arange(max_sequences + 1, dtype=np.uint32) << np.uint32(sequence_shift), n)
    sequence = np.repeat(sequence_bits, lengths.ravel())

    special = np.flatnonzero(ids.ravel() <= vocabulary.last_special)
    special = special[vocabulary.special[ids.ravel()[special]]]
    owner = special // seq_len * (max_sequences + 1) + (sequence[special] >> np.uint32(sequence_shift))
    specials = np.bincount(owner, minlength=lengths.size).reshape(lengths.shape)
    maskable = (lengths - specials)[:, :max_sequences]
    budget = _budgets(maskable, keys, masking.rate, masking.capacity(seq_len))

    position = np.arange(seq_len, dtype=np.uint32)
    drawn = _hash32(*_halves(keys[:, None]), position + CHOICE)
    drawn >>= np.uint32(32 - sequence_shift)
    drawn &= ~position_mask
    drawn |= position
    drawn |= sequence.reshape(n, seq_len)
    if masking.strategy != "token":
        span_keys = keys if masking.strategy == "span" else None
        return _choose_words(drawn, vocabulary.unit_start[ids.ravel()], special, lengths, specials, budget, span_keys)
    drawn.ravel()[special] = MAX_UINT32
    drawn.sort(axis=1)
    row_start = np.arange(0, n * seq_len, seq_len)
    first = np.cumsum(maskable, axis=1) - maskable + row_start[:, None]
    taken = drawn.ravel()[_ranges(first.ravel(), budget.ravel())] & position_mask
    chosen = np.zeros(drawn.size, dtype=bool)
    chosen[np.repeat(row_start, budget.sum(1)) + taken] = True
    return np.flatnonzero(chosen)


def _choose_words(
    drawn: np.ndarray,
    edge: np.ndarray,
    special: np.ndarray,
    lengths: np.ndarray,
    specials: np.ndarray,
    budget: np.ndarray,
    span_keys: np.ndarray | None,
) -> np.ndarray:
    """As `_choose`: words in the order of the `drawn` numbers (uint32 [n, T]) of their first tokens, skipping those
    that exceed the remaining `budget` (int64 [n, S]) of their sequence.

    Words begin at `edge` (bool [n * T]), after `special` positions (flat, int64), and with sequences. `lengths` and
    `specials`, int64 [n, S + 1]: their tokens, and how many are special; last the padding. With `span_keys`, uint64 [n], the words
    of a span follow each other.
    """
    n, seq_len = drawn.shape
    ends, position_mask = np.cumsum(lengths), _position_mask(seq_len)
    # regardless of the token: after special tokens, at sequence starts, and behind the last row
    edge = np.append(edge, True)
    edge[special + 1] = edge[ends] = edge[0] = True
    edge[special] = False
    turned = None if span_keys is None else _join_spans(drawn, np.flatnonzero(edge[:-1]), ends, span_keys)
    drawn = np.where(edge[:-1].reshape(n, seq_len), drawn, MAX_UINT32)
    drawn.sort(axis=1)
    edge[special] = True
    edges = np.flatnonzero(edge)
    before = np.concatenate(([0], np.cumsum(edge, dtype=np.int32)))
    words = (np.diff(before[ends], prepend=0).reshape(lengths.shape) - specials)[:, :-1]

    row_start = np.arange(0, drawn.size, seq_len)[:, None]
    first = (np.cumsum(words, axis=1) - words + row_start).ravel()
    taken, left, words = np.zeros(edge.size, dtype=bool), budget.ravel().copy(), words.ravel()
    # a word has at least one token, so `budget` words nearly always fill the budget; the rest is a second pass
    likely = np.minimum(left, words)
    for begin, count in ((first, likely), (first + likely, words - likely)):
        count = np.where(left > 0, count, 0)
        group, at = np.repeat(np.arange(len(left)), count), _ranges(begin, count)
        word = (drawn.ravel()[at] & position_mask) + at // seq_len * seq_len
        word = word if turned is None else turned[word]
        # Each round takes a sequence's words up to the first that does not fit, then drops all that exceed the
        # remaining budget. Three rounds nearly always suffice; the maximum is about the number of tokens in the
        # longest word.
        while len(word):
            size = edges[before[word + 1]] - word
            total = np.cumsum(size)
            start = np.flatnonzero(np.diff(group, prepend=-1))
            total -= np.repeat((total - size)[start], np.diff(start, append=len(word)))
            fits = total <= left[group]
            taken[word[fits]] = True
            left -= np.bincount(group[fits], size[fits], len(left)).astype(np.int64)
            rest = ~fits & (size <= left[group])
            word, group = word[rest], group[rest]
    word = np.flatnonzero(taken)
    return _ranges(word, edges[before[word + 1]] - word)


def _join_spans(drawn: np.ndarray, first: np.ndarray, ends: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Give the words of a span the random bits of its first one, in the `drawn` numbers (uint32 [n, T]) of the words' first tokens.

    `first` int64 [W]: their flat positions. `ends` int64: those of sequences and padding. Returns int64 [n * T]: for the
    position of each number that of the word it stands for, so that every word is equally often the k-th in the division into spans.
    """
    position_mask = _position_mask(drawn.shape[1])
    random = _hash32(*_halves(keys[:, None]), np.arange(drawn.shape[1], dtype=np.uint32) + SPAN).ravel()[first]
    # a sequence's k-th word draws the length of its k-th span, if there is one
    length = SPAN_WORDS[random >> np.uint32(16)]
    words = np.diff(np.searchsorted(first, ends), prepend=0)
    words = words[words > 0]
    start = np.cumsum(words) - words
    begin = np.cumsum(length) - length
    begin += np.repeat(start - begin[start], words)
    lead, bits = begin[begin < np.repeat(start + words, words)], drawn.ravel()[first]
    leading = np.repeat(bits[lead] & ~position_mask, np.diff(lead, append=len(first)))
    drawn.ravel()[first] = leading | bits & position_mask
    turn = (random[start] & np.uint32(0xFFFF)) * words >> 16
    halves = np.stack([start + turn, start], axis=1), np.stack([words - turn, turn], axis=1)
    turned = np.arange(drawn.size)
    turned[first] = first[_ranges(*(half.ravel() for half in halves))]
    return turned


def _position_mask(seq_len: int) -> np.uint32:
    """The bits of a position in a row of `seq_len` tokens."""
    return np.uint32((1 << (seq_len - 1).bit_length()) - 1)


def _budgets(maskable: np.ndarray, keys: np.ndarray, rate: float, capacity: int) -> np.ndarray:
    """int64 [n, S]: predictions of each sequence with `maskable` tokens [n, S], at most `capacity` a row.

    One offset a row and differences of floors: each budget is rate x maskable rounded up or down, their sum too.
    """
    total = np.cumsum(maskable, axis=1)
    share = np.minimum(rate, capacity / np.maximum(total[:, -1:], 1))
    offset = (keys >> np.uint64(40)).astype(np.float64)[:, None] / 2.0**24
    budget = np.diff((total * share + offset).astype(np.int64), axis=1, prepend=0)  # truncation is the floor here
    np.maximum(budget, maskable > 0, out=budget)
    # of all predictions, on a circle, those from a random one on are left out until they fit
    ends = np.cumsum(budget, axis=1)
    total = ends[:, -1:]
    start = (keys & np.uint64(0xFFFFFF)).astype(np.int64)[:, None] * total >> 24
    excess = np.maximum(total - capacity, 0)
    left_out = np.clip(ends - start, 0, excess) + np.minimum(ends, np.maximum(start + excess - total, 0))
    return np.diff(ends - left_out, axis=1, prepend=0)


def _halves(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high 32 bits, uint32."""
    return keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)


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


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: starts[0], starts[0] + 1, … (counts[0] of them), then those of starts[1], and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def _replace(
    ids: np.ndarray, chosen: np.ndarray, keys: np.ndarray, vocabulary: MaskingVocabulary, masking: MaskingConfig
) -> Masked:
    """Show `chosen` (flat positions, int64 [P], ascending) as [MASK], as a random token or unchanged.

    A row's predictions in random order take golden-ratio steps around the unit circle from a random start; the angle selects
    the treatment. Each prediction gets a treatment with its probability, and every row is within about one prediction of
    80/10/10, while independent draws would spread ten times wider over a corpus. With spans, a run of neighbouring predictions gets
    one treatment.
    """
    n, seq_len = ids.shape
    capacity = masking.capacity(seq_len)
    row, position, counts, slot = _slots(chosen, n, seq_len)
    at = row * capacity + slot
    positions, labels = np.zeros((n, capacity), np.int32), np.full((n, capacity), IGNORE, np.int64)
    positions.ravel()[at] = position
    labels.ravel()[at] = ids.ravel()[chosen]

    treated, runs = counts, masking.strategy == "span"
    if runs:
        run = np.flatnonzero((np.diff(chosen, prepend=-2) > 1) | (np.diff(row, prepend=-1) > 0))
        length = np.diff(run, append=len(chosen))
        row, position, treated, slot = _slots(chosen[run], n, seq_len)
        at = row * capacity + slot
    low, high = _halves(keys[row])
    slot_mask = np.uint32((1 << (capacity - 1).bit_length()) - 1)
    shuffled = np.full((n, capacity), MAX_UINT32)
    shuffled.ravel()[at] = _hash32(low, high, position + ACTION) & ~slot_mask | slot.astype(np.uint32)
    shuffled.sort(axis=1)
    # the prediction, or run, drawn as the row's slot-th
    nth = (np.cumsum(treated) - treated)[row] + (shuffled.ravel()[at] & slot_mask)
    angle = _hash32(*_halves(keys), np.array([ACTION + np.uint32(0xFFFF)]))[row]
    angle += slot.astype(np.uint32) * np.uint32(GOLDEN32)
    as_mask = angle < np.uint64(round(masking.mask * 2**32))
    as_random = ~as_mask & (angle < np.uint64(round((masking.mask + masking.random) * 2**32)))
    masked, random = (_ranges(run[of], length[of]) if runs else of for of in (nth[as_mask], nth[as_random]))
    shown = ids.astype(np.int32)
    shown.ravel()[chosen[masked]] = vocabulary.mask_id
    row, position = np.divmod(chosen[random], seq_len)
    drawn = _hash32(*_halves(keys[row]), position.astype(np.uint32) + REPLACEMENT).astype(np.uint64)
    drawn = drawn * np.uint64(len(vocabulary.ordinary)) >> np.uint64(32)
    shown.ravel()[chosen[random]] = vocabulary.ordinary[drawn]
    return Masked(shown, positions, labels, counts)


def _slots(chosen: np.ndarray, n: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Row (int64), position (uint32) and number in its row (int64) of each flat position `chosen`, all [P], and their counts [n]."""
    row = chosen // seq_len
    position = (chosen - row * seq_len).astype(np.uint32)
    counts = np.bincount(row, minlength=n)
    return row, position, counts, np.arange(len(chosen)) - (np.cumsum(counts) - counts)[row]


# -- masking by configuration ----------------------------------------------------------------------------------------


def held_out_masking(config: Config) -> MaskingConfig:
    """The masking of held-out rows in every phase: that of the last phase, but always by token, at the rate of evaluation.

    Words and spans are harder to predict; by token the losses of all strategies compare.
    """
    masking = list_phases(config)[-1].config.data.masking
    if not masking.causal:
        masking = replace(masking, "strategy", "token")
    if config.eval.rate:
        # the most predictions of a row are for the run's own rate
        masking = replace(replace(masking, "rate", config.eval.rate), "max_predictions", 0)
    return masking

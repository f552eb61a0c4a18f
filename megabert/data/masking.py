"""Masking of rows: a function of (seed, epoch, row id) and the row, independent of batch, rank, worker and time.

Random numbers are hashes of (seed, epoch, row id, position), so there is no state to save or share. [CLS], [SEP], padding and
every other special id are neither predicted nor drawn as a replacement. The strategies:

    token  positions drawn one by one                                        (Devlin et al. 2019, section 3.1)
    causal nothing is hidden or drawn: each position but the last of its sequence predicts the next id, [SEP] included; with
           `causal_every` only in updates of certain numbers

Budget: a sequence gets rate x (its maskable tokens), rounded so that the row's total is rounded only once and without
bias, and at least 1.

Legend: n rows, T row length, S sequences a row, K prediction slots a row, P predictions in all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megabert.common.random_numbers import stream_keys
from megabert.config import Config, MaskingConfig, phases_of

if TYPE_CHECKING:
    from megabert.data.tokenizer import Tokenizer

# label of a position without prediction: torch's `ignore_index`, and `kIgnore` of csrc
IGNORE = -100
# 2^32 / golden ratio
GOLDEN32 = 0x9E3779B9
LAST = np.uint32(0xFFFFFFFF)
# first counter of each use of a row's random stream
CHOICE, ACTION, REPLACEMENT = (np.uint32(stream << 16) for stream in range(3))


def largest_capacity(config: Config, seq_len: int) -> int:
    """The largest number of prediction slots of a row in any update."""
    if config.causal_updates:
        return seq_len
    return max(phase.config.data.masking.capacity(seq_len) for phase in phases_of(config))


def held_out_masking(config: Config) -> MaskingConfig:
    """The masking of held-out rows in every phase: that of the last phase, at the rate of evaluation."""
    options = phases_of(config)[-1].config.data.masking
    # the most predictions of a row are for the run's own rate
    return options.model_copy(update={"rate": config.eval.rate, "max_predictions": 0}) if config.eval.rate else options


class MaskingVocabulary:
    """What masking needs of a tokenizer: its size, [MASK] and the special ids."""

    def __init__(self, size: int, mask_id: int, special_ids: Iterable[int]) -> None:
        self.mask_id = mask_id
        self.special = np.zeros(size, dtype=bool)
        self.special[list(special_ids)] = True
        self.last_special = int(np.flatnonzero(self.special)[-1])
        self.ordinary = np.flatnonzero(~self.special).astype(np.uint32)
        assert self.special[mask_id] and len(self.ordinary)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MaskingVocabulary:
        return cls(tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids.values())


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
    n, seq_len = ids.shape
    capacity = masking.capacity(seq_len)
    keys = np.broadcast_to(stream_keys(seed, epoch, row_ids), (n,))
    chosen = _choose(ids, bounds, keys, masking.rate, capacity, vocabulary)
    return _replace(ids, chosen, keys, capacity, vocabulary, masking)


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
    ids: np.ndarray, bounds: np.ndarray, keys: np.ndarray, rate: float, capacity: int, vocabulary: MaskingVocabulary
) -> np.ndarray:
    """Flat positions of the predictions, int64 [P], ascending; `keys` uint64 [n]: keys of the rows' random streams.

    Each position gets a number of (sequence, random bits, position), from high to low bits. Sorted, a row holds the positions of
    each sequence in random order, of which the first ones are taken.
    """
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
    budget = _budgets(maskable, keys, rate, capacity)

    position, position_mask = np.arange(seq_len, dtype=np.uint32), np.uint32((1 << position_bits) - 1)
    drawn = _hash32(*_halves(keys[:, None]), position + CHOICE)
    drawn >>= np.uint32(32 - sequence_shift)
    drawn &= ~position_mask
    drawn |= position
    drawn |= sequence.reshape(n, seq_len)
    drawn.ravel()[special] = LAST
    drawn.sort(axis=1)
    row_start = np.arange(0, n * seq_len, seq_len)
    first = np.cumsum(maskable, axis=1) - maskable + row_start[:, None]
    taken = drawn.ravel()[_runs(first.ravel(), budget.ravel())] & position_mask
    chosen = np.zeros(drawn.size, dtype=bool)
    chosen[np.repeat(row_start, budget.sum(1)) + taken] = True
    return np.flatnonzero(chosen)


def _budgets(maskable: np.ndarray, keys: np.ndarray, rate: float, capacity: int) -> np.ndarray:
    """int64 [n, S]: predictions of each sequence with `maskable` tokens [n, S], at most `capacity` a row.

    One offset a row and differences of floors: each budget is rate x maskable rounded up or down, their sum too.
    """
    total = np.cumsum(maskable, axis=1)
    share = np.minimum(rate, capacity / np.maximum(total[:, -1:], 1))
    offset = (keys >> np.uint64(40)).astype(np.float64)[:, None] / 2.0**24
    budget = np.diff((total * share + offset).astype(np.int64), axis=1, prepend=0)  # truncation is the floor here
    np.maximum(budget, maskable > 0, out=budget)
    return np.diff(np.minimum(np.cumsum(budget, axis=1), capacity), axis=1, prepend=0)


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


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: starts[0], starts[0] + 1, … (counts[0] of them), then those of starts[1], and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def _replace(
    ids: np.ndarray,
    chosen: np.ndarray,
    keys: np.ndarray,
    capacity: int,
    vocabulary: MaskingVocabulary,
    masking: MaskingConfig,
) -> Masked:
    """Show `chosen` (flat positions, int64 [P], ascending) as [MASK], as a random token or unchanged.

    A row's predictions in random order take golden-ratio steps around the unit circle from a random start; the angle selects
    the treatment. Each prediction gets a treatment with its probability, and every row is within about one prediction of
    80/10/10, while independent draws would spread ten times wider over a corpus.
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

    low, high = _halves(keys[row])
    slot_mask = np.uint32((1 << (capacity - 1).bit_length()) - 1)
    shuffled = np.full((n, capacity), LAST)
    shuffled.ravel()[at] = _hash32(low, high, position + ACTION) & ~slot_mask | slot.astype(np.uint32)
    shuffled.sort(axis=1)
    nth = before[row] + (shuffled.ravel()[at] & slot_mask)  # [P], the prediction drawn as the row's slot-th
    angle = _hash32(*_halves(keys), np.array([ACTION + np.uint32(0xFFFF)]))[row]
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

"""Packing of sequences into rows: best fit decreasing, at most a number of sequences a row."""

from __future__ import annotations

from collections import Counter

import numpy as np

# sequences packed to choose the number of slots
SEQUENCES_TRIED = 1 << 17
# numbers of sequences a row to choose from
SLOTS = (1, 2, 4, 8, 16)


def choose_slots(lengths: Counter[int], seq_len: int) -> int:
    """The smallest number of sequences a row (1, 2, 4, 8, 16) whose fill is within half a percent of that of 16.

    A slot takes five bytes in every row, so unused ones would be a tenth of a shard of short rows. `lengths` counts sequences by
    length; a sample of them with the same shares is packed.
    """
    total = sum(lengths.values())
    scale = min(1.0, SEQUENCES_TRIED / total)
    sizes = sorted(lengths)
    trial = np.repeat(np.array(sizes, np.int64), [max(1, round(lengths[n] * scale)) for n in sizes])
    rows = {slots: pack(trial, seq_len, slots)[3] for slots in SLOTS}
    return next(slots for slots in rows if rows[slots] <= rows[SLOTS[-1]] * 1.005)


def pack(lengths: np.ndarray, capacity: int, max_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Place sequences of `lengths` [n] in rows of `capacity` tokens, at most `max_sequences` a row.

    Returns (row, slot, offset), each int64 [n], and the number of rows. Best fit decreasing: the longest sequence first, in the given
    order for equal lengths, into the row with the smallest sufficient space. Equal lengths are placed together: there are at most
    `capacity` distinct lengths and remainders, so the cost is that of the distinct lengths and the copies.
    """
    n = len(lengths)
    row, slot, offset = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    values, firsts = np.unique(-lengths[by_length], return_index=True)
    bounds = [*firsts.tolist(), n]
    shortest = int(lengths.min()) if n else 0
    open_rows: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # rows by remaining space
    used: np.ndarray = np.zeros(n, np.int64)  # number of sequences of each row
    has_room = np.zeros(capacity + 1, bool)
    rows = 0
    for value, begin, end in zip(values.tolist(), bounds, bounds[1:], strict=False):
        length = -value
        while begin < end:
            fits = int(np.argmax(has_room[length:])) + length
            if has_room[fits]:
                candidates = open_rows[fits].pop()
                has_room[fits] = bool(open_rows[fits])
                taken = candidates[: end - begin]
                if len(taken) < len(candidates):
                    open_rows[fits].append(candidates[len(taken) :])
                    has_room[fits] = True
            else:
                fits = capacity
                together = min(capacity // length, max_sequences)
                opened = -(-(end - begin) // together)
                taken = np.arange(rows, rows + opened)
                rows += opened
            items = by_length[begin : begin + len(taken)]
            row[items], slot[items], offset[items] = taken, used[taken], capacity - fits
            used[taken] += 1
            left = fits - length
            if left >= shortest:
                unfilled = taken[used[taken] < max_sequences]
                if len(unfilled):
                    open_rows[left].append(unfilled)
                    has_room[left] = True
            begin += len(taken)
    return row, slot, offset, rows

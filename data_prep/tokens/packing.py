"""Packing of whole sequences into rows: best fit, longest first.

Equal lengths are placed together, not one by one. There are at most `capacity` distinct lengths and residuals, so packing
costs the number of distinct lengths and the copies, not the number of sequences times that of rows.
"""

from __future__ import annotations

import numpy as np


def pack(lengths: np.ndarray, capacity: int, max_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Place sequences of `lengths` [n] in rows of `capacity` tokens, at most `max_sequences` a row.

    Returns (row, slot, offset), each int64 [n], and the number of rows. Among equal lengths the given order
    decides. A sequence goes where the space left is smallest (best fit decreasing).
    """
    n = len(lengths)
    row, slot, offset = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    values, firsts = np.unique(-lengths[by_length], return_index=True)
    bounds = [*firsts.tolist(), n]
    shortest = int(lengths.min()) if n else 0
    open_rows: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # by space left
    used: np.ndarray = np.zeros(n, np.int64)  # sequences in a row
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
                still = taken[used[taken] < max_sequences]
                if len(still):
                    open_rows[left].append(still)
                    has_room[left] = True
            begin += len(taken)
    return row, slot, offset, rows

"""Profile of some updates of a run: a trace for Perfetto or TensorBoard, and a table of the costliest operations."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import profile

from megabert.common.logs import log

ROWS = 25  # rows of the table


class Profiler:
    """Profiles the updates from `first` to `last` on this rank, once; none if `first` is 0. A warning says if none of them runs."""

    def __init__(self, folder: Path, rank: int, first: int, last: int, updates: range) -> None:
        """`updates`: those that the run may still do."""
        if first and (last < updates.start or first >= updates.stop):
            end = f"next is {updates.start:,}" if last < updates.start else f"last is {updates.stop - 1:,}"
            log.warning(f"--profile {first}:{last}: none of these updates runs; the {end}")
            first = last = 0
        self._stem, self._first, self._last = folder / f"rank{rank}-steps{first}-{last}", first, last
        self._profile: profile | None = None

    def update(self, step: int) -> None:
        """Call at the beginning of update `step`."""
        if self._profile is not None and step > self._last:
            self.close()
        elif self._profile is None and self._first <= step <= self._last:
            self._profile = profile(record_shapes=True)
            self._profile.start()

    def close(self) -> None:
        """Write the profile and stop profiling."""
        if self._profile is not None:
            self._profile.stop()
            by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            self._stem.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(f"{self._stem}.pt.trace.json")
            Path(f"{self._stem}.txt").write_text(self._profile.key_averages().table(sort_by=by, row_limit=ROWS))
            log.info(f"profile: {self._stem}.pt.trace.json (Perfetto, TensorBoard) and {self._stem}.txt")
        elif self._first:
            log.warning(f"--profile {self._first}:{self._last}: training ended before these updates")
        self._profile, self._first, self._last = None, 0, 0

"""Profile of some updates of a run: a trace for Perfetto or TensorBoard, and a table of the costliest operations."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megabert.common.logs import log

ROWS = 25  # of the table


def parse_steps(text: str) -> tuple[int, int]:
    """`10:20` -> (10, 20), the first and the last update. Raises ValueError."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--profile {text}: write the first and the last update, as 10:20")
    return int(match[1]), int(match[2])


class Profiler:
    """Profiles the updates from `first` to `last` on this rank, once; with `first` 0 none."""

    def __init__(self, folder: Path, rank: int = 0, first: int = 0, last: int = 0) -> None:
        self._folder, self._rank, self._first, self._last = folder, rank, first, last
        self._profile: profile | None = None

    def update(self, step: int) -> None:
        """Update `step` begins."""
        if self._first <= step <= self._last and self._profile is None:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True)
            self._profile.start()
        elif step > self._last:
            self.close()

    def close(self) -> None:
        """Write what was profiled, or say that no update was; nothing is profiled after it."""
        if self._profile is None:
            if self._first:
                log.warning(
                    f"--profile {self._first}:{self._last}: none of these updates was trained here, so nothing is profiled"
                )
            self._first = self._last = 0
            return
        self._profile.stop()
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=by, row_limit=ROWS)
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = self._folder / f"rank{self._rank}-steps{self._first}-{self._last}"
        self._profile.export_chrome_trace(f"{stem}.pt.trace.json")
        Path(f"{stem}.txt").write_text(table)
        self._profile, self._first, self._last = None, 0, 0
        print(f"{table}\nprofile: {stem}.pt.trace.json (Perfetto, TensorBoard) and {stem}.txt", flush=True)

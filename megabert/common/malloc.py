"""Allocator setting that keeps freed memory: what the kernel takes back it hands out again a zeroed page at a time.

Arrays of a few megabytes are made and freed for every batch, and buffers of tens of megabytes in every layer. With glibc's
defaults each of them is a new mapping; faulting its pages in costs up to half of the loader's time and a fifth of a
training step's.
"""

from __future__ import annotations

import ctypes

# malloc.h of glibc; other C libraries have no mallopt
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Tell malloc to reuse what is freed, up to the process's own peak. False where malloc takes no such wish."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wishes = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20))  # no mappings, no trimming
    return min(mallopt(name, value) for name, value in wishes) == 1  # every wish is made, even after a refusal

"""Freed memory stays with the process: what the kernel takes back it hands out again a zeroed page at a time.

Arrays of a few megabytes are made and freed for every batch. With glibc's defaults each of them is a new mapping, and
faulting its pages in costs up to half of the loader's time.
"""

from __future__ import annotations

import ctypes

# malloc.h of glibc; other C libraries have no mallopt
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


def keep_freed_memory() -> bool:
    """Tell malloc to reuse what is freed, up to the process's own peak. False where malloc takes no such wish."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wishes = ((M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD), (M_TRIM_THRESHOLD, 1 << 30), (M_TOP_PAD, 64 << 20))
    return (
        min(mallopt(name, value) for name, value in wishes) == 1
    )  # every wish is made, even after a refusal

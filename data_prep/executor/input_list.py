"""Lists of the files that datasets were built from, as hashes, by which `--add` leaves those files out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.common.arrays import hash_bytes
from data_prep.common.records import FileRange
from data_prep.executor.output_folder import INPUTS
from megabert.common.files import write_whole
from megabert.common.remote import is_url


def write(folder: Path, ranges: Iterable[tuple[int, FileRange]]) -> None:
    """Write the files of `ranges` to a list in `folder`: ascending hashes of their real paths, uint64."""
    paths = {part.path if is_url(part.path) else os.path.realpath(part.path) for _, part in ranges}
    hashes = np.array(sorted(hash_bytes(os.fsencode(path)) for path in paths), "<u8")
    write_whole(folder / INPUTS, hashes.tobytes())


class KnownFiles:
    """Whether a file, by its real path, is in one of the datasets in `folders`."""

    def __init__(self, folders: Iterable[Path]) -> None:
        lists = [np.fromfile(path, "<u8") for folder in folders if (path := folder / INPUTS).is_file()]
        self._hashes = set(np.concatenate([np.zeros(0, "<u8"), *lists]).tolist())

    def __call__(self, path: str) -> bool:
        return hash_bytes(os.fsencode(path)) in self._hashes

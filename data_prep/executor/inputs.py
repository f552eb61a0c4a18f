"""Which files a dataset was built from, as hashes: what is added to it later leaves them out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.common import hashing
from data_prep.common.records import Piece
from data_prep.executor.output_folder import INPUTS
from megabert.common.files import write_whole
from megabert.common.remote import is_url


def _hash(path: str) -> int:
    return hashing.of_bytes(os.fsencode(path))


def write(folder: Path, pieces: Iterable[tuple[int, Piece]]) -> None:
    """Leave the files of `pieces` in `folder`, as ascending hashes of their real paths, uint64."""
    paths = {piece.path if is_url(piece.path) else os.path.realpath(piece.path) for _, piece in pieces}
    hashes = np.array(sorted(map(_hash, paths)), "<u8")
    write_whole(folder / INPUTS, hashes.tobytes())


class Known:
    """Whether a file, by its real path, is in one of the datasets in `folders`; those without a list of files know none."""

    def __init__(self, folders: Iterable[Path]) -> None:
        lists = [folder / INPUTS for folder in folders]
        found = [np.fromfile(path, "<u8") for path in lists if path.is_file()]
        self._hashes = set(np.concatenate([np.zeros(0, "<u8"), *found]).tolist())

    def __call__(self, path: str) -> bool:
        return _hash(path) in self._hashes

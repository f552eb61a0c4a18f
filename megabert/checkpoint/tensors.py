"""Tensors of a checkpoint: each rank's files, and any slice of a parameter read from the files that hold it.

A tensor in a file is a flat slice of a parameter, `<kind>:<parameter>:<first element>` with kind `weight`, `exp_avg` or
`exp_avg_sq`. A rank opens the files it needs and no other, and reads its own slices of them only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabert.checkpoint import manifest as manifests
from megabert.checkpoint.manifest import DamagedCheckpoint, SliceIndex, file_name, group_of
from megabert.common.files import write_tensors
from megabert.engine.zero_layout import WEIGHT, ParameterSlice
from megabert.optim.guarded import MOMENTS

GROUPS = {WEIGHT: manifests.WEIGHTS} | dict.fromkeys(MOMENTS, manifests.MOMENTS)


def write_slices(path: Path, slices: Iterable[ParameterSlice]) -> dict[str, Any]:
    """Write one rank's weights or moments durably; gives the file's entry in the manifest.

    Raises OSError when the disk does not take it.
    """
    tensors: dict[str, Tensor] = {}
    for part in slices:
        tensors |= {_key(kind, part.name, part.offset): values for kind, values in part.values.items()}
    return write_tensors(path, tensors, {"format": "pt"})


class StoredTensors:
    """The tensors of a checkpoint whose files were verified."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._path, self._ranks = path, manifest["ranks"]
        self._index = SliceIndex(manifest["parameters"])
        self._files: dict[str, Any] = {}

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of every parameter."""
        return self._index.shapes

    def read(self, kind: str, name: str, offset: int, into: Tensor) -> None:
        """Fill the flat tensor `into` with elements [offset, offset + numel) of a parameter's `kind`."""
        stop, filled = offset + into.numel(), 0
        for start, length, rank in self._index.slices(name):
            first, last = max(offset, start), min(stop, start + length)
            if first >= last:
                continue
            # mapped: only what is used of it is read
            part = self._tensor(kind, name, start, rank)
            into[first - offset : last - offset].copy_(part[first - start : last - start])
            filled += last - first
        assert filled == into.numel(), (kind, name, offset, stop, filled)  # the index was checked

    def whole(self, kind: str) -> dict[str, Tensor]:
        """Every parameter's `kind`, fp32: those that lie in one slice are maps of the file, not to be written to."""
        tensors = {}
        for name, shape in self.shapes.items():
            slices = self._index.slices(name)
            if len(slices) == 1:
                tensors[name] = self._tensor(kind, name, 0, slices[0][2]).view(shape)
            else:
                tensors[name] = torch.empty(shape, dtype=torch.float32)
                self.read(kind, name, 0, tensors[name].view(-1))
        return tensors

    def _tensor(self, kind: str, name: str, offset: int, rank: int) -> Tensor:
        """The flat slice of a parameter that begins at `offset`, in the file of `rank`."""
        file = file_name(GROUPS[kind], rank, self._ranks)
        if file not in self._files:
            self._files[file] = _open(self._path, file)
        return self._files[file].get_tensor(_key(kind, name, offset)).view(-1)


def check_files(path: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises DamagedCheckpoint unless each of the files holds in fp32 what the manifest lists."""
    index, ranks = SliceIndex(manifest["parameters"]), manifest["ranks"]
    rank_of = {file_name(group, rank, ranks): rank for group in set(GROUPS.values()) for rank in index.by_rank}
    single = set(manifest["first_moment_only"])
    for file in names:
        listed = {
            _key(kind, name, offset): ("F32", [length])
            for name, offset, length in index.by_rank[rank_of[file]]
            for kind, group in GROUPS.items()
            if group == group_of(file) and not (kind == MOMENTS[1] and name in single)
        }
        if _headers(path, file) != listed:
            raise DamagedCheckpoint(f"{path.name}/{file} holds other slices than the manifest lists")


def _headers(path: Path, name: str) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of every tensor in a safetensors file, from its header."""
    with _open(path, name) as file:
        tensors = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (tensor.get_dtype(), list(tensor.get_shape())) for key, tensor in tensors.items()}


def _key(kind: str, name: str, offset: int) -> str:
    assert kind in GROUPS
    return f"{kind}:{name}:{offset}"


def _open(path: Path, name: str) -> Any:
    try:
        return safe_open(path / name, "pt")
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path.name}/{name}: {error}") from error

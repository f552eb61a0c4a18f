"""Tensors of a checkpoint: each rank's files, and any stretch of a parameter read from the files that hold it.

A tensor in a file is a flat stretch of a parameter, `<kind>:<parameter>:<first element>` with kind `weight`, `exp_avg`
or `exp_avg_sq`. A rank opens the files it needs and no other, and reads its own slices of them only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabert.checkpoint import manifest as manifests
from megabert.checkpoint.index import Index
from megabert.checkpoint.manifest import SCHEMA, Damaged, file_name, group_of, has_moments
from megabert.common.tensor_file import write_tensors
from megabert.engine.zero_layout import WEIGHT, Piece
from megabert.optim.optimizers import MOMENTS

GROUPS = {WEIGHT: manifests.WEIGHTS} | dict.fromkeys(MOMENTS, manifests.MOMENTS)
Span = tuple[int, int, str, str]  # first element, number of elements, file, tensor in it


def write_pieces(path: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Write one rank's weights or moments durably; gives the file's entry in the manifest.

    Raises OSError when the disk does not take it.
    """
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        tensors |= {_key(kind, piece.name, piece.offset): values for kind, values in piece.values.items()}
    return write_tensors(path, tensors, {"format": "pt"})


class Stored:
    """The tensors of a checkpoint of any layout, whose files were verified."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._path, self._manifest = path, manifest
        self._new = manifest["schema"] == SCHEMA
        self._open: dict[str, Any] = {}

    @cached_property
    def shapes(self) -> Mapping[str, list[int]]:
        """Of every parameter."""
        if self._new:
            return self._index.shapes
        return {name: shape for name, (_, shape) in tensors_of(self._path, OLD_WEIGHTS).items()}

    def read(self, kind: str, name: str, offset: int, into: Tensor) -> None:
        """Fill the flat tensor `into` with elements [offset, offset + numel) of a parameter's `kind`."""
        stop, filled = offset + into.numel(), 0
        for start, length, file, key in self._spans(kind, name):
            first, last = max(offset, start), min(stop, start + length)
            if first >= last:
                continue
            part = self._file(file).get_tensor(key).view(-1)  # mapped: only what is used of it is read
            into[first - offset : last - offset].copy_(part[first - start : last - start])
            filled += last - first
        assert filled == into.numel(), (kind, name, offset, stop, filled)  # the pieces were checked

    def whole(self, kind: str) -> dict[str, Tensor]:
        """Every parameter's `kind`, fp32: read-only maps, as long as nobody writes, of those that lie in one piece."""
        found = {}
        for name, shape in self.shapes.items():
            spans = list(self._spans(kind, name))
            if len(spans) == 1:
                found[name] = self._file(spans[0][2]).get_tensor(spans[0][3]).view(shape)
            else:
                found[name] = torch.empty(shape, dtype=torch.float32)
                self.read(kind, name, 0, found[name].view(-1))
        return found

    @cached_property
    def _index(self) -> Index:
        return Index(self._manifest["parameters"])

    def _spans(self, kind: str, name: str) -> Iterator[Span]:
        if self._new:
            for offset, length, rank in self._index.spans(name):
                file = file_name(GROUPS[kind], rank, self._manifest["ranks"])
                yield offset, length, file, _key(kind, name, offset)
        elif kind == WEIGHT:
            yield 0, math.prod(self.shapes[name]), OLD_WEIGHTS, name
        else:
            for offset, length, file in _old_spans(self._manifest).get(name, []):
                yield offset, length, file, _key(kind, name, offset)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = _open(self._path, name)
        return self._open[name]


def check_files(path: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises Damaged unless each of the files holds in fp32 what the manifest says."""
    if manifest["schema"] != SCHEMA:
        _check_old_files(path, manifest, names)
        return
    index, ranks = Index(manifest["parameters"]), manifest["ranks"]
    ranks_of = {file_name(group, r, ranks): r for group in set(GROUPS.values()) for r in index.held}
    single = set(manifest["first_moment_only"])
    for file in names:
        kinds = [kind for kind, group in GROUPS.items() if group == group_of(file)]
        listed = {
            _key(kind, name, offset): ("F32", [length])
            for name, offset, length in index.held[ranks_of[file]]
            for kind in kinds
            if not (kind == MOMENTS[1] and name in single)
        }
        if tensors_of(path, file) != listed:
            raise Damaged(f"{path.name}/{file} holds other pieces than the manifest lists")


def tensors_of(path: Path, name: str) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of every tensor in a safetensors file, from its header."""
    with _open(path, name) as file:
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (part.get_dtype(), list(part.get_shape())) for key, part in parts.items()}


def _key(kind: str, name: str, offset: int) -> str:
    assert kind in GROUPS
    return f"{kind}:{name}:{offset}"


def _open(path: Path, name: str) -> Any:
    try:
        return safe_open(path / name, "pt")
    except SafetensorError as error:
        raise Damaged(f"{path.name}/{name}: {error}") from error


# -- the layout before: rank 0's whole weights in one file, and each moments file's pieces beside it in the manifest -----

OLD_WEIGHTS = f"{manifests.WEIGHTS}.safetensors"


def _check_old_files(path: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if group_of(name) == manifests.MOMENTS:
            entry = manifest["files"][name]
            single = set(entry.get("first_moment_only", ()))
            listed = {
                _key(kind, parameter, offset): ("F32", [length])
                for parameter, pieces in entry.get("pieces", {}).items()
                for offset, length in pieces
                for kind in (MOMENTS[:1] if parameter in single else MOMENTS)
            }
            if tensors_of(path, name) != listed:
                raise Damaged(f"{path.name}/{name} holds other pieces than the manifest lists")


def check_old_pieces(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises Damaged unless the moments' pieces cover every weight exactly once (none where there are no moments yet)."""
    updated = has_moments(manifest["engine"])
    spans, sizes = _old_spans(manifest), {}
    for name, (kind, shape) in tensors_of(path, OLD_WEIGHTS).items():
        if kind != "F32":
            raise Damaged(f"{path.name}/{OLD_WEIGHTS}: {name} is {kind}, not F32")
        sizes[name] = math.prod(shape)
    for name in sizes.keys() | spans.keys():
        covered = 0
        for offset, length, source in sorted(spans.get(name, [])):
            if offset != covered or length < 1:
                raise Damaged(f"{path.name}/{source}: its piece of {name} at {offset} does not start at {covered}")
            covered += length
        if covered != (sizes.get(name, 0) if updated else 0):
            raise Damaged(f"{path.name}: its moments hold {covered} of the {sizes.get(name, 0)} elements of {name}")


def _old_spans(manifest: Mapping[str, Any]) -> dict[str, list[tuple[int, int, str]]]:
    """(offset, length, file) of every piece of each parameter's moments."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for source, entry in manifest["files"].items():
        for name, pieces in entry.get("pieces", {}).items():
            found.setdefault(name, []).extend((offset, length, source) for offset, length in pieces)
    return found

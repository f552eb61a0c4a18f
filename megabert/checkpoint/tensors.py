"""Tensors of a checkpoint: its safetensors files, where each stretch of a moment lies in them, and that none is missing.

The manifest lists the pieces of each moments file, so that a rank opens the files it needs and no other, and reads its
own slices of them only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabert.checkpoint.manifest import WEIGHTS, Damaged, entry_of
from megabert.common.errors import Failed
from megabert.engine.optimizers import MOMENTS
from megabert.engine.zero_layout import Piece


def moments_file(rank: int, size: int) -> str:
    return f"moments-{rank:05d}-of-{size:05d}.safetensors"


def write_weights(folder: Path, weights: Mapping[str, Tensor], name: str = WEIGHTS) -> dict[str, Any]:
    """Write whole weights, or their average, durably; gives the file's entry in the manifest. Raises OSError when the disk
    does not take it."""
    return _write(folder / name, dict(weights))


def write_moments(path: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Write one rank's moments durably; gives the file's entry. Raises OSError when the disk does not take it."""
    tensors: dict[str, Tensor] = {}
    listed: dict[str, list[list[int]]] = {}
    single: set[str] = set()
    for piece in pieces:
        listed.setdefault(piece.name, []).append([piece.offset, piece.length])
        tensors |= {_key(kind, piece.name, piece.offset): tensor for kind, tensor in piece.moments.items()}
        single |= {piece.name} if len(piece.moments) == 1 else set()
    entry = _write(path, tensors) | {"pieces": listed}
    return entry | {"first_moment_only": sorted(single)} if single else entry


def read_weights(path: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    """The weights of a checkpoint folder, or their average, whose file was verified: a read-only map of it as long as nobody
    writes."""
    try:
        return load_file(path / name)
    except SafetensorError as error:
        raise Damaged(f"{path.name}/{name}: {error}") from error


def check_moments(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Raises Damaged unless a moments file of `path` holds the pieces that its entry in the manifest lists, in fp32."""
    single = set(entry.get("first_moment_only", ()))
    listed = {
        _key(kind, parameter, offset): ("F32", [length])
        for parameter, pieces in entry.get("pieces", {}).items()
        for offset, length in pieces
        for kind in (MOMENTS[:1] if parameter in single else MOMENTS)
    }
    if _tensors_of(path, name) != listed:
        raise Damaged(f"{path.name}/{name} holds other pieces than the manifest lists")


def has_moments(manifest: Mapping[str, Any]) -> bool:
    """Whether there were moments: after an update, or taken over from another run."""
    return bool(manifest["engine"]["optimizer_steps"] or manifest["engine"].get("primed"))


def check_pieces(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises Damaged unless the moments' pieces cover every weight exactly once (none where there are no moments yet)."""
    updated = has_moments(manifest)
    spans, sizes = _spans(manifest), {}
    for name, (kind, shape) in _tensors_of(path, WEIGHTS).items():
        if kind != "F32":
            raise Damaged(f"{path.name}/{WEIGHTS}: {name} is {kind}, not F32")
        sizes[name] = math.prod(shape)
    for name in sizes.keys() | spans.keys():
        covered = 0
        for offset, length, source in sorted(spans.get(name, [])):
            if offset != covered or length < 1:
                raise Damaged(
                    f"{path.name}/{source}: its piece of {name} at {offset} does not start at {covered}"
                )
            covered += length
        if covered != (sizes.get(name, 0) if updated else 0):
            raise Damaged(
                f"{path.name}: its moments hold {covered} of the {sizes.get(name, 0)} elements of {name}"
            )


class Moments:
    """The moments of a checkpoint whose files and pieces were checked, read by stretches of a parameter."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._path, self._spans = path, _spans(manifest)
        self._open: dict[str, Any] = {}

    def read(self, kind: str, name: str, offset: int, into: Tensor) -> None:
        """Fill the flat tensor `into` with elements [offset, offset + numel) of a parameter's `kind`."""
        stop, filled = offset + into.numel(), 0
        for start, length, source in self._spans.get(name, []):
            first, last = max(offset, start), min(stop, start + length)
            if first >= last:
                continue
            if source not in self._open:
                self._open[source] = _open(self._path, source)
            part = self._open[source].get_slice(_key(kind, name, start))
            into[first - offset : last - offset].copy_(part[first - start : last - start])
            filled += last - first
        assert filled == into.numel(), (kind, name, offset, stop, filled)  # the pieces were checked


def _key(kind: str, name: str, offset: int) -> str:
    assert kind in MOMENTS
    return f"{kind}:{name}:{offset}"


def _spans(manifest: Mapping[str, Any]) -> dict[str, list[tuple[int, int, str]]]:
    """(offset, length, file) of every piece of each parameter."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for source, entry in manifest["files"].items():
        for name, pieces in entry.get("pieces", {}).items():
            found.setdefault(name, []).extend((offset, length, source) for offset, length in pieces)
    return found


def _open(path: Path, name: str) -> Any:
    try:
        return safe_open(path / name, "pt")
    except SafetensorError as error:
        raise Damaged(f"{path.name}/{name}: {error}") from error


def _tensors_of(path: Path, name: str) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of every tensor in a safetensors file, from its header."""
    with _open(path, name) as file:
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (part.get_dtype(), list(part.get_shape())) for key, part in parts.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library makes it readable by its owner alone
    except SafetensorError as error:
        raise Failed(f"{path}: {error}") from error
    return entry_of(path)

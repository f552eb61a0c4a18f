"""Tensors of a checkpoint: each rank's files, and full parameters read from the files of all ranks.

A tensor in a file is a flat slice of a parameter, `<kind>:<parameter>:<first element>` with kind `weight`, `exp_avg` or
`exp_avg_sq`.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabert.checkpoint import manifest as manifests
from megabert.checkpoint.manifest import DamagedCheckpoint, SliceIndex, file_name, group_of, share
from megabert.common.files import write_tensors
from megabert.distributed.ranks import World
from megabert.engine.zero_layout import WEIGHT, ParameterSlice
from megabert.optim.guarded import MOMENTS

GROUPS = {WEIGHT: manifests.WEIGHTS} | dict.fromkeys(MOMENTS, manifests.MOMENTS)
# Approximate number of elements in one all-reduce.
BUCKET = 25_000_000


def write_slices(path: Path, slices: Iterable[ParameterSlice]) -> dict[str, Any]:
    """Write and fsync one rank's weights or moments; returns the file's entry in the manifest. Raises OSError."""
    return write_tensors(path, named(slices), {"format": "pt"})


def named(slices: Iterable[ParameterSlice]) -> dict[str, Tensor]:
    """The tensors of slices by their names in a file."""
    return {_key(kind, part.name, part.offset): values for part in slices for kind, values in part.values.items()}


class StoredTensors:
    """Tensors in files that several ranks wrote. Each rank reads some of the files, and the ranks exchange the tensors."""

    def __init__(
        self,
        place: str | Path,
        parameters: Mapping[str, Any],
        single: set[str],
        files: Mapping[tuple[str, int], Any],
        world: World,
    ) -> None:
        """`place`: its name in messages; `parameters`: as in a manifest; `single`: parameters without a second moment; `files`: files
        that this rank has opened, by group and the rank that wrote them. Each file is opened on one rank only."""
        self._index, self._single, self._files, self._world = SliceIndex(parameters), single, files, world
        self._place = place

    @classmethod
    def of_checkpoint(cls, path: Path, manifest: Mapping[str, Any], world: World) -> StoredTensors:
        """Tensors of a verified checkpoint; each rank opens its share of the files (`manifest.share`)."""
        parameters, ranks = manifest["parameters"], manifest["ranks"]
        places = {
            file_name(group, rank, ranks): (group, rank)
            for group in set(GROUPS.values())
            for rank in SliceIndex(parameters).by_rank
        }
        files = {places[name]: open_file(path, name) for name, _ in share(manifest["files"], world.rank, world.size)}
        return cls(path, parameters, set(manifest["first_moment_only"]), files, world)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of all parameters by name."""
        return self._index.shapes

    def whole(self, *kinds: str) -> Iterator[tuple[str, str, Tensor]]:
        """Kind, name and all elements (flat, fp32) of every parameter that has this kind; the same on every rank. A collective.

        The all-reduce sums the bits as integers, which is exact: as floats, -0.0 + 0.0 would be 0.0. Raises as `refuse_non_finite`.
        """
        device = self._world.device if self._world.size > 1 else torch.device("cpu")
        for kind in kinds:
            names = [name for name in self.shapes if not (kind == MOMENTS[1] and name in self._single)]
            while names:
                sizes = [math.prod(self.shapes[name]) for name in names]
                count = max(1, bisect(list(accumulate(sizes)), BUCKET))
                flat = torch.zeros(sum(sizes[:count]), device=device)
                tensors = dict(zip(names[:count], flat.split(sizes[:count]), strict=True))
                for name, tensor in tensors.items():
                    self._read_slices(kind, name, tensor)
                if self._world.size > 1:
                    torch.distributed.all_reduce(flat.view(torch.int32))
                refuse_non_finite(tensors, self._place)
                yield from ((kind, name, tensor) for name, tensor in tensors.items())
                names = names[count:]

    def _read_slices(self, kind: str, name: str, into: Tensor) -> None:
        """Fill in the slices that are in files of this rank."""
        for offset, length, rank in self._index.slices(name):
            file = self._files.get((GROUPS[kind], rank))
            if file is not None:
                into[offset : offset + length].copy_(file.get_tensor(_key(kind, name, offset)))


def refuse_non_finite(tensors: Mapping[str, Tensor], place: str | Path) -> None:
    """Raises ValueError naming the first of `tensors`, read from `place`, that has NaN or an infinity. One pass over each."""
    for name, tensor in tensors.items():
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(
                f"{place}: {name} has NaN or infinite values: its training diverged, or the file is damaged; name another "
                "model or an earlier checkpoint"
            )


def check_files(path: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises DamagedCheckpoint unless each file has the fp32 slices that the manifest lists."""
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
    """Type and shape of every tensor in a safetensors file."""
    with open_file(path, name) as file:
        tensors = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (tensor.get_dtype(), list(tensor.get_shape())) for key, tensor in tensors.items()}


def _key(kind: str, name: str, offset: int) -> str:
    assert kind in GROUPS
    return f"{kind}:{name}:{offset}"


def open_file(path: Path, name: str) -> Any:
    """Open a safetensors file. Raises DamagedCheckpoint if it is not one."""
    try:
        return safe_open(path / name, "pt")
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path.name}/{name}: {error}") from error

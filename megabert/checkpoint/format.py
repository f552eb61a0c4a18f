"""Format of a checkpoint: a manifest of files and slices, and safetensors files with flat slices of parameters, one pair a rank.

The manifest lists each file with its size and SHA-256; no file is parsed before these are verified. It only names regular files of its
folder: a name with a slash, `..` or a link counts as damage. The slices of a parameter are listed from its first element to its last.
An entry `[rank, ranks, length]` stands for `length` elements on each of `ranks` ranks, starting at `rank`; a parameter that ZeRO
partitions into 512 has one or two entries. A tensor in a file is one slice, `<kind>:<parameter>:<first element>` with kind `weight`,
`exp_avg` or `exp_avg_sq`.
"""

from __future__ import annotations

import json
import math
import stat
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabert.common.chain import SEAL
from megabert.common.errors import with_retries
from megabert.common.files import hash_file, refuse_newer, sealed, write_tensors
from megabert.distributed.ranks import World
from megabert.engine.zero_layout import WEIGHT, ParameterSlice, Snapshot
from megabert.optim.guarded import MOMENTS as OPTIMIZER_MOMENTS

SCHEMA = 3
MANIFEST = "manifest.json"
# A rank writes one file per group of tensors; GROUPS has the group of each kind of tensor.
WEIGHTS, MOMENTS = "weights", "moments"
GROUPS = {WEIGHT: WEIGHTS} | dict.fromkeys(OPTIMIZER_MOMENTS, MOMENTS)
Slice = tuple[str, int, int]  # (parameter, first element, number of elements)
BUCKET = 25_000_000  # approximate number of elements in one all-reduce


# -- manifest ---------------------------------------------------------------------------------------------------------


class DamagedCheckpoint(ValueError):
    """A checkpoint differs from what was committed."""


def list_slices(parameters: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Slice, int]]:
    """Every slice that the field "parameters" of a manifest lists, in order, with its rank."""
    for name, entry in parameters.items():
        position = 0
        for first, count, length in entry["pieces"]:
            for rank in range(first, first + count):
                yield (name, position, length), rank
                position += length


def slices_by_rank(manifest: Mapping[str, Any]) -> dict[int, list[Slice]]:
    """The slices of each rank that has any."""
    by_rank: dict[int, list[Slice]] = {}
    for part, rank in list_slices(manifest["parameters"]):
        by_rank.setdefault(rank, []).append(part)
    return by_rank


def index_slices(shapes: Mapping[str, Sequence[int]], slices: Iterable[Iterable[Slice]]) -> dict[str, Any]:
    """The field "parameters" of a manifest, from the slices of every rank in rank order.

    Raises ValueError if they do not cover each parameter exactly once.
    """
    by_name: dict[str, list[tuple[int, int, int]]] = {name: [] for name in shapes}
    for rank, held in enumerate(slices):
        for name, offset, length in held:
            by_name.setdefault(name, []).append((offset, length, rank))
    entries = {}
    for name, parts in by_name.items():
        pieces: list[list[int]] = []
        covered, size = 0, math.prod(shapes[name]) if name in shapes else 0
        for offset, length, rank in sorted(parts):
            if offset != covered or length < 1:
                raise ValueError(f"rank {rank}'s slice of {name} at {offset} does not start at {covered}")
            covered += length
            if pieces and rank == pieces[-1][0] + pieces[-1][1] and length == pieces[-1][2]:
                pieces[-1][1] += 1
            else:
                pieces.append([rank, 1, length])
        if covered != size:
            raise ValueError(f"the ranks hold {covered} of the {size} elements of {name}")
        entries[name] = {"shape": list(shapes[name]), "pieces": pieces}
    return entries


def file_name(group: str, rank: int, ranks: int) -> str:
    """Name of the file of a rank's WEIGHTS or MOMENTS."""
    return f"{group}-{rank:05d}-of-{ranks:05d}.safetensors"


def place_files(manifest: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Group and rank of each file that a manifest's slices may be in, by name."""
    ranks, holders = manifest["ranks"], slices_by_rank(manifest)
    return {file_name(group, rank, ranks): (group, rank) for group in (WEIGHTS, MOMENTS) for rank in holders}


def describe_slices(snapshot: Snapshot) -> tuple[list[Slice], list[str]]:
    """A rank's slices, and its parameters without a second moment."""
    held = [(part.name, part.offset, part.length) for part in snapshot.weights]
    assert not snapshot.moments or held == [(part.name, part.offset, part.length) for part in snapshot.moments]
    return held, sorted({part.name for part in snapshot.moments if len(part.values) == 1})


def has_moments(engine: Mapping[str, Any]) -> bool:
    """Whether the optimizer had moments, from updates or from another run. `engine`: its counters."""
    return bool(engine["optimizer_steps"] or engine.get("primed"))


def seal(fields: Mapping[str, Any], state: Mapping[str, Any], engine: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest. `fields`: "ranks", "files", "parameters" and "first_moment_only" (names of parameters without a
    second moment: Muon's matrices); `engine`: the counters of `Engine.snapshot`."""
    return sealed({"schema": SCHEMA, **fields, "state": state, "engine": engine}, SEAL)


def read_manifest(path: Path, weights_only: bool = False) -> dict[str, Any]:
    """The manifest of a checkpoint folder; `weights_only`: without the files of moments.

    Raises DamagedCheckpoint unless its bytes are those that were written, OSError if reading fails repeatedly.
    """
    manifest = parse_manifest(with_retries(lambda: _plain(path / MANIFEST).read_bytes()), path.name)
    if weights_only:
        manifest["files"] = {n: entry for n, entry in manifest["files"].items() if n.startswith(WEIGHTS)}
    return manifest


def parse_manifest(data: bytes, checkpoint: str) -> dict[str, Any]:
    """The manifest whose bytes are `data`. Raises DamagedCheckpoint naming the checkpoint, ValueError for a later version's."""
    try:
        manifest: dict[str, Any] = json.loads(data)
        problem = _problem(manifest, data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{checkpoint}/{MANIFEST} cannot be read") from error
    if problem:
        raise DamagedCheckpoint(f"{checkpoint}/{MANIFEST}: {problem}")
    refuse_newer(manifest["schema"], SCHEMA, f"{checkpoint}/{MANIFEST}")
    return manifest


def _problem(manifest: Mapping[str, Any], data: bytes) -> str:
    """Why a manifest, whose bytes are `data`, is not one that `seal` made; "" if it is."""
    if sealed(manifest, SEAL) != data:
        return "damaged: it does not match its own SHA-256"
    if manifest["schema"] > SCHEMA:
        return ""  # a later version's, not damage: `refuse_newer` reports it
    if manifest["schema"] != SCHEMA:
        return f"unsupported format {manifest['schema']}, expected {SCHEMA}"
    both = has_moments(manifest["engine"])
    expected = {name for name, (group, _) in place_files(manifest).items() if both or group == WEIGHTS}
    wrong = sorted(expected ^ manifest["files"].keys())
    return f"its fields 'files' and 'parameters' disagree ({wrong[0]!r})" if wrong else ""


def share(files: Mapping[str, Mapping[str, Any]], rank: int, ranks: int) -> list[tuple[str, Mapping[str, Any]]]:
    """The files that one of `ranks` ranks verifies and reads, with their entries. Files are dealt out in order of size."""
    return sorted(files.items(), key=lambda item: -item[1]["bytes"])[rank::ranks]


def verify_files(path: Path, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises DamagedCheckpoint naming the first file that is missing, a link, of another size or with another SHA-256."""
    for name, entry in entries:
        file = _plain(path / name)
        if file.stat().st_size != entry["bytes"]:
            raise DamagedCheckpoint(f"{path.name}/{name} has {file.stat().st_size} bytes, not {entry['bytes']}")
        if hash_file(file) != entry["sha256"]:
            raise DamagedCheckpoint(f"{path.name}/{name}: its SHA-256 differs from the manifest's")


def _plain(file: Path) -> Path:
    """`file`. Raises DamagedCheckpoint if it is missing or a link."""
    try:
        mode = file.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(f"{file.parent.name}/{file.name} is missing") from None
    if not stat.S_ISREG(mode):
        raise DamagedCheckpoint(f"{file.parent.name}/{file.name} is not a regular file")
    return file


# -- tensors ----------------------------------------------------------------------------------------------------------


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
        """`place`: path for error messages; `parameters`: a manifest's field; `single`: parameters without a second
        moment; `files`: files that this rank has opened, by (group, rank that wrote it). Each file is opened on one
        rank only."""
        self._place, self._single, self._files, self._world = place, single, files, world
        self.shapes: dict[str, list[int]] = {name: entry["shape"] for name, entry in parameters.items()}
        self._slices: dict[str, list[tuple[int, int, int]]] = {name: [] for name in parameters}
        for (name, offset, length), rank in list_slices(parameters):
            self._slices[name].append((offset, length, rank))

    @classmethod
    def of_checkpoint(cls, path: Path, manifest: Mapping[str, Any], world: World) -> StoredTensors:
        """Tensors of a verified checkpoint; each rank opens its share of the files (`share`)."""
        places = place_files(manifest)
        files = {places[name]: open_file(path, name) for name, _ in share(manifest["files"], world.rank, world.size)}
        return cls(path, manifest["parameters"], set(manifest["first_moment_only"]), files, world)

    def gather_all(self, *kinds: str) -> Iterator[tuple[str, str, Tensor]]:
        """Kind, name and all elements (flat, fp32) of every parameter that has this kind; the same on every rank. A collective.

        The all-reduce sums the bits as integers, which is exact: as floats, -0.0 + 0.0 would be 0.0. Raises as `refuse_non_finite`.
        """
        device = self._world.device if self._world.size > 1 else torch.device("cpu")
        for kind in kinds:
            names = [name for name in self.shapes if not (kind == OPTIMIZER_MOMENTS[1] and name in self._single)]
            while names:
                sizes = [math.prod(self.shapes[name]) for name in names]
                count = max(1, bisect(list(accumulate(sizes)), BUCKET))
                flat = torch.zeros(sum(sizes[:count]), device=device)
                tensors = dict(zip(names[:count], flat.split(sizes[:count]), strict=True))
                for name, tensor in tensors.items():
                    for offset, length, rank in self._slices[name]:
                        if (file := self._files.get((GROUPS[kind], rank))) is not None:  # of this rank
                            tensor[offset : offset + length].copy_(file.get_tensor(_key(kind, name, offset)))
                if self._world.size > 1:
                    torch.distributed.all_reduce(flat.view(torch.int32))
                refuse_non_finite(tensors, self._place)
                yield from ((kind, name, tensor) for name, tensor in tensors.items())
                names = names[count:]


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
    places, by_rank = place_files(manifest), slices_by_rank(manifest)
    single = set(manifest["first_moment_only"])
    for file in names:
        of_file, rank = places[file]
        listed = {
            _key(kind, name, offset): ("F32", [length])
            for name, offset, length in by_rank[rank]
            for kind, group in GROUPS.items()
            if group == of_file and not (kind == OPTIMIZER_MOMENTS[1] and name in single)
        }
        if _headers(path, file) != listed:
            raise DamagedCheckpoint(f"{path.name}/{file}: its tensors differ from those that the manifest lists")


def _headers(path: Path, name: str) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of every tensor in a safetensors file."""
    with open_file(path, name) as file:
        tensors = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (tensor.get_dtype(), list(tensor.get_shape())) for key, tensor in tensors.items()}


def _key(kind: str, name: str, offset: int) -> str:
    assert kind in GROUPS
    return f"{kind}:{name}:{offset}"


def open_file(path: Path, name: str) -> Any:
    """Open a safetensors file. Raises DamagedCheckpoint if it is missing, or is not one."""
    try:
        return safe_open(path / name, "pt")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path.name}/{name} is missing") from None
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path.name}/{name}: {error}") from error

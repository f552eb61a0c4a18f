"""Several datasets as one: the versions of one that text was added to, and a mixture of datasets with weights.

Which row a position holds stays a function of the seed, the manifests and the weights, or the positions where versions began.
Row ids count through the parts in their order, so that no two rows share one, nor a mask. Legend: n positions or rows, T row
length, S sequences a row.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.canonical_json import compact
from megabert.common.logs import log
from megabert.common.remote import exists, is_url, join, parent
from megabert.data.order import MIX_STREAM, RowOrder, permutation
from megabert.data.shards import ADDED, MANIFEST, DamagedRow, Dataset, Manifest, Rows, order_of

OPEN_SHARDS = 512  # kept open at once by a mixture: 64 of each dataset are read from in turn
WINDOW = 1 << 12  # positions that hold each dataset of a mixture in exactly its share
COUNTED = ("tokens", "sequences")  # the statistics that a run reads


@dataclass(frozen=True)
class Segment:
    """From position `start` on epochs are of the first `parts` parts; the first of them is epoch `epoch`."""

    parts: int
    start: int
    epoch: int


def fingerprint_of(parts: Sequence[str]) -> str:
    """SHA-256 of a list of fingerprints and figures."""
    return hashlib.sha256(compact(list(parts))).hexdigest()


class Joined(ABC):
    """Rows of several datasets of one row length and tokenizer under one count of ids, as `Dataset` gives them.

    `manifest` is the first part's, with the rows and sequence slots of all, a fingerprint of theirs, and as statistics the
    tokens and sequences of so many rows as they are trained on. Raises ValueError naming the part that does not fit the first.
    """

    def __init__(self, parts: Sequence[AnyDataset]) -> None:
        self.parts: tuple[AnyDataset, ...] = tuple(parts)
        first = self.parts[0]
        for part in self.parts[1:]:
            _check_alike(first, part)
        self.offsets = [0]
        for part in self.parts:
            self.offsets.append(self.offsets[-1] + part.rows)
        self.rows: int = self.offsets[-1]
        self.keep_open(OPEN_SHARDS)
        self.place: str = first.place
        self.tolerant: bool = first.tolerant
        self.problems: list[str] = [problem for part in self.parts for problem in part.problems]
        self.manifest: Manifest = first.manifest.model_copy(
            update={
                "rows": self.rows,
                "max_sequences": max(part.manifest.max_sequences for part in self.parts),
                "statistics": self._statistics(),
                "fingerprint": self.fingerprint(),
            }
        )

    def keep_open(self, shards: int) -> None:
        """Of all parts together at most so many shards, and one of each: every one takes a file descriptor."""
        for part in self.parts:
            part.keep_open(max(1, shards // len(self.parts)))

    def _statistics(self) -> dict[str, float]:
        weights, each = np.array(self.weights()), [part.manifest for part in self.parts]
        counted = [name for name in COUNTED if all(name in m.statistics for m in each)]
        a_row = {name: np.array([m.statistics[name] / m.rows for m in each]) for name in counted}
        return {name: float(self.rows * (weights @ a_row[name]) / weights.sum()) for name in counted}

    @abstractmethod
    def weights(self) -> list[int]:
        """How many rows of each part are trained on beside how many of the others."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Of the parts and of how they are joined."""

    @abstractmethod
    def order(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `Dataset.order`."""

    @abstractmethod
    def epoch(self, position: int) -> int:
        """As `Dataset.epoch`."""

    @property
    def tokenizer_path(self) -> Path:
        return self.parts[0].tokenizer_path

    @property
    def held_out_path(self) -> str | Path | None:
        """The first part's: figures stay comparable when text is added."""
        return self.parts[0].held_out_path

    def empty(self, n: int) -> Rows:
        """n rows of zeros: they hold no sequence."""
        slots = self.manifest.max_sequences
        return Rows(
            np.zeros((n, self.manifest.seq_len), self.manifest.dtype),
            np.zeros((n, slots, 2), np.uint16),
            np.zeros((n, slots), np.int8),
        )

    def read(self, row_ids: np.ndarray) -> Rows:
        """As `Dataset.read`."""
        rows, damage = self.examine(row_ids)
        for text in damage.values():
            raise DamagedRow(text)
        return rows

    def read_ahead(self, row_ids: np.ndarray) -> None:
        """As `Dataset.read_ahead`."""
        for number, here in self._by_part(row_ids):
            self.parts[number].read_ahead(row_ids[here] - self.offsets[number])

    def _by_part(self, row_ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The parts that rows lie in, each with the indices of its rows."""
        part = np.searchsorted(self.offsets, row_ids, side="right") - 1
        for number in np.unique(part).tolist():
            yield number, np.flatnonzero(part == number)

    def examine(self, row_ids: np.ndarray) -> tuple[Rows, dict[int, str]]:
        """As `Dataset.examine`."""
        rows, damage = self.empty(len(row_ids)), dict[int, str]()
        rows.isnext[:] = -1
        for number, here in self._by_part(row_ids):
            found, damaged = self.parts[number].examine(row_ids[here] - self.offsets[number])
            slots = found.isnext.shape[1]
            rows.ids[here] = found.ids
            rows.bounds[here, :slots], rows.isnext[here, :slots] = found.bounds, found.isnext
            damage |= {int(here[i]): text for i, text in damaged.items()}
        return rows, dict(sorted(damage.items()))


class Versions(Joined):
    """A dataset and what was added to it later. A run goes on with a new version where an epoch of the old one ends."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        super().__init__(parts)
        self.segments = [Segment(len(self.parts), 0, 0)]
        self._orders: dict[int, RowOrder] = {}  # of the first so many parts

    def fingerprints(self) -> list[str]:
        """Of the dataset as it was with its first part, its first two, and so on."""
        own = [part.manifest.fingerprint for part in self.parts]
        return [own[0], *(fingerprint_of(own[:count]) for count in range(2, len(own) + 1))]

    def fingerprint(self) -> str:
        return self.fingerprints()[-1]

    def weights(self) -> list[int]:
        return [part.rows for part in self.parts]

    def resume(self, fingerprint: str, segments: Sequence[Mapping[str, int]], position: int) -> None:
        """Go on, at global `position`, with the order of a run that saw the version `fingerprint` in `segments`.

        Parts added since join at the next end of an epoch.
        """
        seen = self.fingerprints().index(fingerprint) + 1
        self.segments = [Segment(**segment) for segment in segments] or [Segment(seen, 0, 0)]
        if seen == len(self.parts):
            return
        last = self.segments[-1]
        if last.start > position:  # a version that has not begun gives way to the newest
            self.segments[-1] = Segment(len(self.parts), last.start, last.epoch)
            return
        rows = self.offsets[last.parts]
        epochs = -(-(position - last.start) // rows)
        start = Segment(len(self.parts), last.start + epochs * rows, last.epoch + epochs)
        self.segments = [*self.segments[:-1], *([last] if epochs else []), start]

    def epoch(self, position: int) -> int:
        segment = next(segment for segment in reversed(self.segments) if segment.start <= position)
        return segment.epoch + (position - segment.start) // self.offsets[segment.parts]

    def order(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row_ids, epochs = np.empty_like(positions), np.empty_like(positions)
        starts = [segment.start for segment in self.segments]
        number = np.searchsorted(starts, positions, side="right") - 1
        for i in np.unique(number).tolist():
            here, segment = number == i, self.segments[i]
            found = self._order_of(segment.parts).by_epoch(seed, positions[here] - segment.start, segment.epoch)
            row_ids[here], epochs[here] = found
        return row_ids, epochs

    def _order_of(self, parts: int) -> RowOrder:
        if parts not in self._orders:
            self._orders[parts] = order_of([part.manifest for part in self.parts[:parts]])
        return self._orders[parts]


class Mixture(Joined):
    """Datasets of which every WINDOW positions hold a fixed share each, in an order that the seed decides.

    `shares` sum to 1. A dataset's own rows come in the order in which it alone would give them, epoch after epoch.
    """

    def __init__(self, parts: Sequence[AnyDataset], shares: Sequence[float]) -> None:
        self.counts = _counts(shares)
        super().__init__(parts)

    def fingerprint(self) -> str:
        return self.fingerprint_with([part.manifest.fingerprint for part in self.parts])

    def weights(self) -> list[int]:
        return self.counts

    def fingerprint_with(self, fingerprints: Sequence[str]) -> str:
        """That of a mixture in these shares of datasets that have these fingerprints."""
        return fingerprint_of([*fingerprints, *map(str, self.counts)])

    def epoch(self, position: int) -> int:
        """Of the first dataset."""
        return self.parts[0].epoch(position // WINDOW * self.counts[0])

    def order(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row_ids, epochs = np.empty_like(positions), np.empty_like(positions)
        window, at = np.divmod(positions, WINDOW)
        place = np.empty_like(positions)
        for w in np.unique(window).tolist():
            here = window == w
            place[here] = _places_of_window(seed, w)[at[here]]
        edges = np.append(0, np.cumsum(self.counts))
        part = np.searchsorted(edges, place, side="right") - 1
        for number in np.unique(part).tolist():
            here = part == number
            own = window[here] * self.counts[number] + place[here] - edges[number]
            found, epochs[here] = self.parts[number].order(seed, own)
            row_ids[here] = found + self.offsets[number]
        return row_ids, epochs


AnyDataset = Dataset | Versions | Mixture


@lru_cache(maxsize=64)
def _places_of_window(seed: int, window: int) -> np.ndarray:
    """Permutation of range(WINDOW), int64: the places of a window of a mixture in their order."""
    return permutation(WINDOW, MIX_STREAM, seed, window)


def _counts(shares: Sequence[float]) -> list[int]:
    """Positions of each dataset in a window: whole numbers nearest to the shares, at least 1, that sum to WINDOW."""
    assert abs(sum(shares) - 1) < 1e-9 and min(shares) > 0, shares
    counts = [max(1, int(share * WINDOW)) for share in shares]
    rest = sorted(range(len(shares)), key=lambda i: shares[i] * WINDOW - counts[i], reverse=True)
    for i in range(WINDOW - sum(counts)):
        counts[rest[i % len(rest)]] += 1
    counts[int(np.argmax(counts))] -= max(0, sum(counts) - WINDOW)
    return counts


def _check_alike(first: AnyDataset, part: AnyDataset) -> None:
    a, b = first.manifest, part.manifest
    for what, mine, its in (
        ("row length", a.seq_len, b.seq_len),
        ("tokenizer (SHA-256)", a.tokenizer["sha256"], b.tokenizer["sha256"]),
        ("sentence pairs", a.options.get("nsp", True), b.options.get("nsp", True)),
    ):
        if mine != its:
            raise ValueError(f"{part.place}: its {what} is {its}, that of {first.place} {mine}; build it to fit")


def added_folder(folder: str | Path, number: int) -> str | Path | None:
    """Where what was added to a dataset for the `number`th time lies; None where it was not, or is not whole yet.

    Beside its shards; of one of several row lengths in their common folder. `folder` may be a URL.
    """
    name = ADDED.format(number)
    if isinstance(folder, str) and is_url(folder):
        own = folder.rstrip("/").rsplit("/", 1)[-1]
        urls = (join(folder, name), join(parent(folder), name, own))
        return next((url for url in urls if _is_published(join(url, MANIFEST))), None)
    folder = Path(folder)
    for place in (folder / name, folder.parent / name / folder.name):
        if (place / MANIFEST).is_file():
            return place
    return None


def _is_published(url: str) -> bool:
    """Whether there is a file. Where a bucket may not be listed, S3 refuses a name that is not there: with the dataset itself
    readable, that is taken for no."""
    try:
        return exists(url)
    except PermissionError:
        log.debug(f"{url}: may not be asked for, taken as not there")
        return False


def open_versions(folder: str, tolerant: bool = False, shards: bool = True) -> Dataset | Versions:
    """A dataset with all that was added to it; `shards` as of `open_mixture`. Raises ValueError as `Dataset` does."""
    parts: list[Dataset] = []
    place: str | Path | None = folder
    while place is not None:
        parts.append(Dataset(place, tolerant, None if shards else Manifest.load(place)))
        place = added_folder(folder, len(parts))
    return _versions(parts)


def open_mixture(folder: str, mix: Mapping[str, float], tolerant: bool = False, shards: bool = True) -> AnyDataset:
    """The dataset in `folder`, or its mixture with those of `mix`, a share of all rows by folder.

    `shards`: false where they may be elsewhere: the manifests are read and no shard is looked for. Raises ValueError where
    shares leave nothing for `folder`.
    """
    main = open_versions(folder, tolerant, shards)
    if not mix:
        return main
    if sum(mix.values()) >= 1 or min(mix.values()) <= 0:
        raise ValueError(f"data.mix={dict(mix)}: give shares above 0 that leave one for data.path")
    if folder in mix:
        raise ValueError(f"data.mix names {folder}, which is data.path; what it leaves is that one's share")
    return _mixture([main, *(open_versions(path, tolerant, shards) for path in mix)], mix)


def _versions(parts: Sequence[Dataset]) -> Dataset | Versions:
    return Versions(parts) if len(parts) > 1 else parts[0]


def _mixture(members: Sequence[AnyDataset], mix: Mapping[str, float]) -> AnyDataset:
    return Mixture(members, [1 - sum(mix.values()), *mix.values()]) if mix else members[0]


def told(dataset: AnyDataset) -> list[list[list[Any]]]:
    """Folder and manifest of each part of each dataset of a mixture, as JSON values from which `open_told` opens it."""
    parts = (member.parts if isinstance(member, Versions) else (member,) for member in _members(dataset))
    return [[[part.place, part.manifest.told()] for part in of_one] for of_one in parts]


def open_told(found: Sequence[Sequence[Sequence[Any]]], mix: Mapping[str, float], tolerant: bool = False) -> AnyDataset:
    """The dataset or mixture that another process of this machine has opened, by what it `told`; nothing is read."""
    members = (
        _versions([Dataset(folder, tolerant, Manifest.of_told(its)) for folder, its in parts]) for parts in found
    )
    return _mixture(list(members), mix)


def described(dataset: AnyDataset) -> dict[str, Any]:
    """What a checkpoint says of its data: the fingerprint of all of it, and of several datasets what each one is."""
    found: dict[str, Any] = {"dataset": dataset.manifest.fingerprint}
    if isinstance(dataset, Joined):
        found["datasets"] = [
            {"folder": part.place, "fingerprint": part.manifest.fingerprint}
            | ({"segments": [asdict(s) for s in part.segments]} if isinstance(part, Versions) else {})
            for part in _members(dataset)
        ]
    return found


def resume(dataset: AnyDataset, saved: Mapping[str, Any], position: int) -> bool:
    """Take up the order of a checkpoint's data at global `position`; whether `saved` is of this data, or of less of it.

    `saved` is what `described` gave. What was added since joins where an epoch ends.
    """
    if "datasets" not in saved and not isinstance(dataset, Mixture):
        old: list[Mapping[str, Any]] = [{"fingerprint": saved["dataset"]}]
    else:
        old = saved.get("datasets", [])
    members = _members(dataset)
    if len(old) != len(members):
        return False
    for part, its in zip(members, old, strict=True):
        known = part.fingerprints() if isinstance(part, Versions) else [part.manifest.fingerprint]
        if its["fingerprint"] not in known:
            return False
    if isinstance(dataset, Mixture):
        if dataset.fingerprint_with([its["fingerprint"] for its in old]) != saved["dataset"]:
            return False
        places = [-(-position // WINDOW) * count for count in dataset.counts]
    else:
        places = [position]
    for part, its, place in zip(members, old, places, strict=True):
        if isinstance(part, Versions):
            part.resume(its["fingerprint"], its.get("segments", []), place)
    return True


def _members(dataset: AnyDataset) -> tuple[AnyDataset, ...]:
    """The datasets of a mixture; else the one there is."""
    return dataset.parts if isinstance(dataset, Mixture) else (dataset,)

"""Several datasets as one: the versions of a dataset that text was added to, and a mixture of datasets with shares.

The row at a position stays a function of the seed, the manifests and the shares, or the positions where versions start. Row ids
count through the parts in their order, so that no two rows share one, nor a mask.

Legend: n positions or rows, T row length, S sequences a row, V vocabulary size.
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

from megabert.common.files import compact
from megabert.common.logs import log
from megabert.common.remote import exists, is_url, join, parent
from megabert.data.order import MIX_STREAM, RowOrder, permutation
from megabert.data.shards import ADDED, MANIFEST, DamagedRow, Dataset, Manifest, Rows, order_of

# shards that a mixture keeps open: 64 of each dataset are read from in turn
OPEN_SHARDS = 512
# positions that hold each dataset of a mixture in exactly its share
WINDOW = 1 << 12
# statistics that a run reads
STATISTICS = ("tokens", "sequences")
# `token_counts`: tokens counted at most (the error of a frequency of 1e-5 is then a sixth of it), places where neighbouring rows
# are taken (so that few shards are opened or fetched), rows read at once
COUNTED_TOKENS, COUNTED_PLACES, COUNTED_ROWS = 1 << 22, 64, 1 << 12


def fingerprint_of(parts: Sequence[str]) -> str:
    """SHA-256 of a list of fingerprints and numbers."""
    return hashlib.sha256(compact(list(parts))).hexdigest()


class Joined(ABC):
    """Several datasets of one row length and tokenizer, with the methods of `Dataset` and one count of row ids.

    `manifest` is the first part's, with the rows and sequence slots of all, a common fingerprint, and as statistics the tokens
    and sequences of as many rows in the shares they are trained in. Raises ValueError naming the part that does not fit the first.
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

    @abstractmethod
    def weights(self) -> list[int]:
        """The relative numbers of rows of the parts that are trained on."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Of the parts and of how they are joined."""

    @abstractmethod
    def order(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `Dataset.order`."""

    @abstractmethod
    def epoch(self, position: int) -> int:
        """As `Dataset.epoch`."""

    def keep_open(self, shards: int) -> None:
        """Keep at most so many shards of all parts open, but one of each: every one takes a file descriptor."""
        for part in self.parts:
            part.keep_open(max(1, shards // len(self.parts)))

    def _statistics(self) -> dict[str, float]:
        weights, manifests = np.array(self.weights()), [part.manifest for part in self.parts]
        known = [name for name in STATISTICS if all(name in m.statistics for m in manifests)]
        a_row = {name: np.array([m.statistics[name] / m.rows for m in manifests]) for name in known}
        return {name: float(self.rows * (weights @ a_row[name]) / weights.sum()) for name in known}

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

    def examine(self, row_ids: np.ndarray) -> tuple[Rows, dict[int, str]]:
        """As `Dataset.examine`."""
        rows, damage = self.empty(len(row_ids)), dict[int, str]()
        rows.isnext[:] = -1
        for number, places in self._by_part(row_ids):
            part_rows, damaged = self.parts[number].examine(row_ids[places] - self.offsets[number])
            slots = part_rows.isnext.shape[1]
            rows.ids[places] = part_rows.ids
            rows.bounds[places, :slots], rows.isnext[places, :slots] = part_rows.bounds, part_rows.isnext
            damage |= {int(places[i]): text for i, text in damaged.items()}
        return rows, dict(sorted(damage.items()))

    def read_ahead(self, row_ids: np.ndarray) -> None:
        """As `Dataset.read_ahead`."""
        for number, places in self._by_part(row_ids):
            self.parts[number].read_ahead(row_ids[places] - self.offsets[number])

    def _by_part(self, row_ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The parts of the rows, each with the indices of its rows."""
        part = np.searchsorted(self.offsets, row_ids, side="right") - 1
        for number in np.unique(part).tolist():
            yield number, np.flatnonzero(part == number)


@dataclass(frozen=True)
class Segment:
    """From position `start` on epochs are of the first `parts` parts; the first of them is epoch `epoch`."""

    parts: int
    start: int
    epoch: int


class Versions(Joined):
    """A dataset and the parts added to it later. A run takes up a new version where an epoch of the old one ends."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        super().__init__(parts)
        self.segments = [Segment(len(self.parts), 0, 0)]
        # by number of parts
        self._orders: dict[int, RowOrder] = {}

    def fingerprints(self) -> list[str]:
        """Of the dataset with its first part, its first two, and so on."""
        each = [part.manifest.fingerprint for part in self.parts]
        return [each[0], *(fingerprint_of(each[:count]) for count in range(2, len(each) + 1))]

    def fingerprint(self) -> str:
        return self.fingerprints()[-1]

    def weights(self) -> list[int]:
        return [part.rows for part in self.parts]

    def resume(self, fingerprint: str, segments: Sequence[Mapping[str, int]], position: int) -> None:
        """Continue, at global `position`, the order of a run that saw the version `fingerprint` in `segments`.

        Parts added since join at the next end of an epoch.
        """
        seen = self.fingerprints().index(fingerprint) + 1
        self.segments = [Segment(**segment) for segment in segments] or [Segment(seen, 0, 0)]
        if seen == len(self.parts):
            return
        last = self.segments[-1]
        if last.start > position:  # the newest version replaces one that has not started
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
        number = np.searchsorted([segment.start for segment in self.segments], positions, side="right") - 1
        for i in np.unique(number).tolist():
            chosen, segment = number == i, self.segments[i]
            order = self._order_of(segment.parts)
            row_ids[chosen], epochs[chosen] = order.by_epoch(seed, positions[chosen] - segment.start, segment.epoch)
        return row_ids, epochs

    def _order_of(self, parts: int) -> RowOrder:
        if parts not in self._orders:
            self._orders[parts] = order_of([part.manifest for part in self.parts[:parts]])
        return self._orders[parts]


class Mixture(Joined):
    """Datasets of which every WINDOW positions hold a fixed share each, in an order that depends on the seed.

    `shares` sum to 1. A dataset's rows come in the order that it has alone, epoch after epoch.
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
            chosen = window == w
            place[chosen] = _places_of_window(seed, w)[at[chosen]]
        edges = np.append(0, np.cumsum(self.counts))
        part = np.searchsorted(edges, place, side="right") - 1
        for number in np.unique(part).tolist():
            chosen = part == number
            # positions in the dataset's order alone
            alone = window[chosen] * self.counts[number] + place[chosen] - edges[number]
            part_ids, epochs[chosen] = self.parts[number].order(seed, alone)
            row_ids[chosen] = part_ids + self.offsets[number]
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
    for what, want, found in (
        ("row length", a.seq_len, b.seq_len),
        ("tokenizer (SHA-256)", a.tokenizer["sha256"], b.tokenizer["sha256"]),
        ("sentence pairs", a.options.get("nsp", True), b.options.get("nsp", True)),
    ):
        if want != found:
            raise ValueError(f"{part.place}: its {what} is {found}, that of {first.place} {want}; build it to fit")


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

    `shards`: false where they may be elsewhere: only the manifests are read. Raises ValueError where the shares leave nothing
    for `folder`.
    """
    main = open_versions(folder, tolerant, shards)
    if not mix:
        return main
    if sum(mix.values()) >= 1 or min(mix.values()) <= 0:
        raise ValueError(f"data.mix={dict(mix)}: give shares above 0 that leave one for data.path")
    if folder in mix:
        raise ValueError(f"data.mix names {folder}, which is data.path; its share is what the others leave")
    return _mixture([main, *(open_versions(path, tolerant, shards) for path in mix)], mix)


def _versions(parts: Sequence[Dataset]) -> Dataset | Versions:
    return Versions(parts) if len(parts) > 1 else parts[0]


def _mixture(members: Sequence[AnyDataset], mix: Mapping[str, float]) -> AnyDataset:
    return Mixture(members, [1 - sum(mix.values()), *mix.values()]) if mix else members[0]


def _members(dataset: AnyDataset) -> tuple[AnyDataset, ...]:
    """The datasets of a mixture; else the one there is."""
    return dataset.parts if isinstance(dataset, Mixture) else (dataset,)


def added_folder(folder: str | Path, number: int) -> str | Path | None:
    """Where the `number`th addition to a dataset lies; None where there is none, or not a whole one yet.

    Beside its shards; of one of several row lengths in their common folder. `folder` may be a URL.
    """
    name = ADDED.format(number)
    if isinstance(folder, str) and is_url(folder):
        base = folder.rstrip("/").rsplit("/", 1)[-1]
        urls = (join(folder, name), join(parent(folder), name, base))
        return next((url for url in urls if _is_published(join(url, MANIFEST))), None)
    folder = Path(folder)
    for place in (folder / name, folder.parent / name / folder.name):
        if (place / MANIFEST).is_file():
            return place
    return None


def _is_published(url: str) -> bool:
    """Whether there is a file. In a bucket that may not be listed, S3 answers "forbidden" for a missing name: with the dataset
    itself readable, that means no."""
    try:
        return exists(url)
    except PermissionError:
        log.debug(f"{url}: forbidden, taken as missing")
        return False


def to_json(dataset: AnyDataset) -> list[list[list[Any]]]:
    """Folder and manifest of each part of each dataset of a mixture, as JSON values from which `from_json` opens it."""
    parts = (member.parts if isinstance(member, Versions) else (member,) for member in _members(dataset))
    return [[[part.place, part.manifest.to_json()] for part in of_one] for of_one in parts]


def from_json(tree: Sequence[Sequence[Sequence[Any]]], mix: Mapping[str, float], tolerant: bool = False) -> AnyDataset:
    """The dataset or mixture that another process of this machine has opened and checked; nothing is read."""
    members = [
        _versions([Dataset(folder, tolerant, Manifest.from_json(manifest)) for folder, manifest in parts])
        for parts in tree
    ]
    return _mixture(members, mix)


def identity(dataset: AnyDataset) -> dict[str, Any]:
    """The data's entries in a checkpoint: the fingerprint of all of it, and of several datasets each one's."""
    entries: dict[str, Any] = {"dataset": dataset.manifest.fingerprint}
    if isinstance(dataset, Joined):
        entries["datasets"] = [
            {"folder": part.place, "fingerprint": part.manifest.fingerprint}
            | ({"segments": [asdict(s) for s in part.segments]} if isinstance(part, Versions) else {})
            for part in _members(dataset)
        ]
    return entries


def resume(dataset: AnyDataset, saved: Mapping[str, Any], position: int) -> bool:
    """Continue the order of a checkpoint's data at global `position`; whether `saved` (`identity`) is this data, or less of it.

    Parts added since join where an epoch ends.
    """
    if "datasets" not in saved and not isinstance(dataset, Mixture):
        entries: list[Mapping[str, Any]] = [{"fingerprint": saved["dataset"]}]
    else:
        entries = saved.get("datasets", [])
    members = _members(dataset)
    if len(entries) != len(members):
        return False
    for part, entry in zip(members, entries, strict=True):
        known = part.fingerprints() if isinstance(part, Versions) else [part.manifest.fingerprint]
        if entry["fingerprint"] not in known:
            return False
    if isinstance(dataset, Mixture):
        if dataset.fingerprint_with([entry["fingerprint"] for entry in entries]) != saved["dataset"]:
            return False
        positions = [-(-position // WINDOW) * count for count in dataset.counts]
    else:
        positions = [position]
    for part, entry, own_position in zip(members, entries, positions, strict=True):
        if isinstance(part, Versions):
            part.resume(entry["fingerprint"], entry.get("segments", []), own_position)
    return True


def token_counts(dataset: AnyDataset, predicted: np.ndarray) -> np.ndarray:
    """int64 [V]: how often each id that is `predicted` (bool [V]; not padding) occurs in about COUNTED_TOKENS tokens, else 0.

    From rows at places spread evenly, the same for the same dataset. Damaged rows of a tolerant one are left out; otherwise the
    first one raises DamagedRow.
    """
    manifest = dataset.manifest
    places = np.arange(COUNTED_PLACES) * manifest.rows // COUNTED_PLACES
    together = -(-COUNTED_TOKENS // manifest.seq_len // COUNTED_PLACES)
    chosen = (places[:, None] + np.arange(together)).ravel()
    if len(chosen) >= manifest.rows:
        chosen = np.arange(manifest.rows)
    counts = np.zeros(len(predicted), np.int64)
    for first in range(0, len(chosen), COUNTED_ROWS):
        row_ids = chosen[first : first + COUNTED_ROWS]
        dataset.read_ahead(row_ids)
        # a damaged row is padding
        rows = dataset.examine(row_ids)[0] if dataset.tolerant else dataset.read(row_ids)
        counts += np.bincount(rows.ids.ravel(), minlength=len(predicted))
    return counts * predicted

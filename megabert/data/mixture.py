"""Mixtures: several datasets as one, each with a share of all rows; and the data of a run's phases.

The row at a position is a function of the seed, the manifests and the shares. Row ids are numbered through the parts in order, so
that ids and masks differ between all rows. A later phase skips the rows of a dataset that an earlier phase used.

Legend: n positions or rows, T row length, S sequences a row, V vocabulary size.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common import storage
from megabert.common.files import compact
from megabert.common.logs import warn_once
from megabert.config import Config
from megabert.data.names import distinct_ends
from megabert.data.order import MIX_STREAM, permutation
from megabert.data.shards import Dataset, Manifest, Rows
from megabert.data.shards.remote import DEFAULT, Cache

# shards that a mixture keeps open: 64 of each dataset are in use at a time
OPEN_SHARDS = 512
# positions that hold each dataset of a mixture in exactly its share
WINDOW = 1 << 12
# statistics that a run reads
STATISTICS = ("tokens", "sequences")
# `token_counts`: most tokens to count (the error of a frequency of 1e-5 is then a sixth of it), number of places from which
# neighbouring rows are read (so that few shards are opened), rows read at once
COUNTED_TOKENS, COUNTED_PLACES, COUNTED_ROWS = 1 << 22, 64, 1 << 12


class Mixture:
    """Datasets with fixed shares of every WINDOW positions, in an order that depends on the seed.

    It has the methods of `Dataset`. `shares` sum to 1. The rows of each dataset keep its order, epoch after epoch.
    `manifest` is the first part's, with the rows and sequence slots of all, a fingerprint of parts and shares, and as statistics
    the tokens and sequences of as many rows in these shares. Raises ValueError naming the part that does not fit the first.
    """

    def __init__(self, parts: Sequence[Dataset], shares: Sequence[float]) -> None:
        self.parts, self.counts = tuple(parts), _counts(shares)
        first = self.parts[0]
        for part in self.parts[1:]:
            _check_alike(first, part)
        seen: dict[str, Dataset] = {}
        in_cache = sum(storage.is_url(part.place) for part in self.parts) or 1
        for part in self.parts:
            if (other := seen.setdefault(part.manifest.fingerprint, part)) is not part:
                raise ValueError(f"{part.place}: is the dataset of {other.place}; name it once, with both shares")
            part.most_open = max(1, min(part.most_open, OPEN_SHARDS // len(self.parts)))
            part.share_cache(in_cache)
        self.offsets = [0, *np.cumsum([part.rows for part in self.parts]).tolist()]
        self.rows: int = self.offsets[-1]
        self.folder, self.tokenizer_path = first.folder, first.tokenizer_path
        manifests = [part.manifest for part in self.parts]
        fingerprint = compact([*(m.fingerprint for m in manifests), *map(str, self.counts)])
        self.manifest: Manifest = first.manifest.model_copy(
            update={
                "rows": self.rows,
                "max_sequences": max(m.max_sequences for m in manifests),
                "statistics": self._statistics(manifests),
                "fingerprint": hashlib.sha256(fingerprint).hexdigest(),
            }
        )

    def _statistics(self, manifests: Sequence[Manifest]) -> dict[str, float]:
        weights = np.array(self.counts)
        known = [name for name in STATISTICS if all(name in m.statistics for m in manifests)]
        a_row = {name: np.array([m.statistics[name] / m.rows for m in manifests]) for name in known}
        return {name: float(self.rows * (weights @ a_row[name]) / weights.sum()) for name in known}

    @property
    def identity(self) -> dict[str, Any]:
        """Its entries in a checkpoint: the fingerprint of all of it, and each dataset's."""
        parts = [{"folder": part.place, "fingerprint": part.manifest.fingerprint} for part in self.parts]
        return {"dataset": self.manifest.fingerprint, "datasets": parts}

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

    def read(self, row_ids: np.ndarray) -> Rows:
        rows = Rows.without_sequences(len(row_ids), self.manifest)
        for number, places in self._by_part(row_ids):
            part_rows = self.parts[number].read(row_ids[places] - self.offsets[number])
            slots = part_rows.isnext.shape[1]
            rows.ids[places] = part_rows.ids
            rows.bounds[places, :slots], rows.isnext[places, :slots] = part_rows.bounds, part_rows.isnext
        return rows

    def read_ahead(self, row_ids: np.ndarray) -> None:
        for number, places in self._by_part(row_ids):
            self.parts[number].read_ahead(row_ids[places] - self.offsets[number])

    def fetch_ahead(self, seed: int, position: int, progress: Callable[[int, int], object] | None = None) -> None:
        for part, count in zip(self.parts, self.counts, strict=True):
            part.fetch_ahead(seed, position // WINDOW * count, progress)

    def stop_fetching(self) -> None:
        for part in self.parts:
            part.stop_fetching()

    def _by_part(self, row_ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The parts of the rows, each with the indices of its rows."""
        part = np.searchsorted(self.offsets, row_ids, side="right") - 1
        for number in np.unique(part).tolist():
            yield number, np.flatnonzero(part == number)


AnyDataset = Dataset | Mixture


@lru_cache(maxsize=64)
def _places_of_window(seed: int, window: int) -> np.ndarray:
    """Permutation of range(WINDOW), int64: the places of a window of a mixture in their order."""
    return permutation(WINDOW, MIX_STREAM, seed, window)


def _counts(shares: Sequence[float]) -> list[int]:
    """Positions of each dataset in a window: whole numbers nearest to the shares, which are at least one, that sum to WINDOW."""
    assert abs(sum(shares) - 1) < 1e-9, shares
    counts = [int(share * WINDOW) for share in shares]
    rest = sorted(range(len(shares)), key=lambda i: shares[i] * WINDOW - counts[i], reverse=True)
    for i in rest[: WINDOW - sum(counts)]:
        counts[i] += 1
    return counts


def _check_alike(first: Dataset, part: Dataset) -> None:
    a, b = first.manifest, part.manifest
    for what, want, value in (
        ("row length", a.seq_len, b.seq_len),
        ("tokenizer (SHA-256)", a.tokenizer["sha256"], b.tokenizer["sha256"]),
        ("sentence pairs", a.options.get("nsp", True), b.options.get("nsp", True)),
    ):
        if want != value:
            raise ValueError(f"{part.folder}: its {what} is {value}, that of {first.folder} {want}; build it to fit")


def check_data_fits(config: Config, manifest: Manifest) -> None:
    """Raises ValueError naming the field where config and data disagree. Warns of sentence pairs that nothing learns from."""
    model = config.model
    if model.vocab_size not in (0, manifest.vocab_size):
        raise ValueError(f"model.vocab_size={model.vocab_size} but the tokenizer has {manifest.vocab_size}; remove it")
    length = config.data.seq_len
    if length not in (0, manifest.seq_len):
        raise ValueError(
            f"data.seq_len={length} but {config.data.path} has rows of {manifest.seq_len} tokens; set data.path (of a phase "
            "phases.N.data.path) to a dataset of such rows, or data.seq_len to 0"
        )
    if manifest.seq_len > model.max_positions:
        raise ValueError(f"model.max_positions={model.max_positions} is below the dataset's seq_len={manifest.seq_len}")
    pairs = manifest.options.get("nsp")
    if model.nsp and pairs is False:
        raise ValueError(
            "model.nsp=true but the dataset has no sentence pairs; build it with --nsp, or set model.nsp=false"
        )
    if pairs and not model.nsp:
        warn_once(
            "the dataset's rows are sentence pairs, of which half have a random second part, and model.nsp=false learns nothing from "
            "them; build it without --nsp for rows of running text"
        )


def open_mixture(folder: str, mix: Mapping[str, float], shards: bool = True, cache: Cache = DEFAULT) -> AnyDataset:
    """The dataset in `folder`, or its mixture with those of `mix`, a share of all rows by folder.

    `shards`: false reads only the manifests. `cache`: for URLs. Raises ValueError as `Dataset` does, and if the shares leave nothing for `folder`.
    """
    if mix and min(*mix.values(), 1 - sum(mix.values())) * WINDOW < 1 - 1e-9:
        raise ValueError(f"data.mix={dict(mix)}: give shares of at least 1/{WINDOW} that leave as much for data.path")
    if folder in mix:
        raise ValueError(f"data.mix names {folder}, which is data.path; its share is what the others leave")
    return _mixture([Dataset(path, None if shards else Manifest.load(path), cache) for path in (folder, *mix)], mix)


def _mixture(parts: Sequence[Dataset], mix: Mapping[str, float]) -> AnyDataset:
    return Mixture(parts, [1 - sum(mix.values()), *mix.values()]) if mix else parts[0]


def members(dataset: AnyDataset) -> tuple[Dataset, ...]:
    """The datasets of a mixture; a dataset alone is its only one."""
    return dataset.parts if isinstance(dataset, Mixture) else (dataset,)


def distinct_names(folders: Sequence[str | Path]) -> list[str]:
    """A name for each folder: the last parts of its path, as few as distinguish all of them; with its number where none do."""
    return distinct_ends([Path(folder).absolute().parts[1:] for folder in folders])


def to_json(dataset: AnyDataset) -> list[tuple[str, Any]]:
    """Folder and manifest of each dataset of a mixture, as JSON values from which `from_json` opens it."""
    return [(part.place, part.manifest.model_dump(by_alias=True)) for part in members(dataset)]


def from_json(tree: Sequence[tuple[str, Any]], mix: Mapping[str, float], cache: Cache = DEFAULT) -> AnyDataset:
    """The dataset or mixture of another process, which has compared its files; nothing is read."""
    return _mixture([Dataset(folder, Manifest.model_validate(manifest), cache) for folder, manifest in tree], mix)


def skip_rows_of_earlier_phases(datasets: Sequence[AnyDataset], sizes: Sequence[int], starts: Sequence[int]) -> int:
    """Make the data of a run's newest phase start after the rows of earlier phases; returns the position of its first update.

    `datasets` and `sizes` (rows of an update) are those of all phases, `starts` the numbers of the first updates of the phases so
    far. Consecutive phases on the same data share one order; otherwise whole windows of a mixture count as used.
    """
    taken: Counter[str] = Counter()
    position = 0
    for number, (start, end) in enumerate(pairwise(starts)):
        position += (end - start) * sizes[number]
        if datasets[number] is not datasets[number + 1]:
            taken.update(_rows_taken(datasets[number], position))
            position = 0
    for part in members(datasets[len(starts) - 1]):
        part.taken = taken[part.manifest.fingerprint]
    return position


def _rows_taken(dataset: AnyDataset, positions: int) -> dict[str, int]:
    """Rows of each dataset, by fingerprint, in the first `positions`, for a mixture rounded up to whole windows."""
    windows = -(-positions // WINDOW)
    rows = [windows * count for count in dataset.counts] if isinstance(dataset, Mixture) else [positions]
    return {part.manifest.fingerprint: count for part, count in zip(members(dataset), rows, strict=True)}


def token_counts(dataset: AnyDataset, predicted: np.ndarray) -> np.ndarray:
    """int64 [V]: how often each id that is `predicted` (bool [V]; not padding) occurs in about COUNTED_TOKENS tokens, else 0; in a
    mixture in rows of its shares.

    Counted in rows at evenly spread places, which depend only on the dataset. Raises as `Dataset.read` does.
    """
    parts, shares = members(dataset), dataset.counts if isinstance(dataset, Mixture) else [WINDOW]
    each = [_count_tokens(part, predicted, COUNTED_TOKENS // len(parts)) for part in parts]
    a_row = sum(share / WINDOW * counts / rows for share, (counts, rows) in zip(shares, each, strict=True))
    return np.rint(a_row * sum(rows for _, rows in each)).astype(np.int64)


def _count_tokens(dataset: Dataset, predicted: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """As `token_counts` in about `most` tokens of a dataset alone, and in how many rows."""
    manifest = dataset.manifest
    places = np.arange(COUNTED_PLACES) * manifest.rows // COUNTED_PLACES
    together = -(-most // manifest.seq_len // COUNTED_PLACES)
    chosen = (places[:, None] + np.arange(together)).ravel()
    if len(chosen) >= manifest.rows:
        chosen = np.arange(manifest.rows)
    counts = np.zeros(len(predicted), np.int64)
    for first in range(0, len(chosen), COUNTED_ROWS):
        row_ids = chosen[first : first + COUNTED_ROWS]
        dataset.read_ahead(row_ids)
        rows = dataset.read(row_ids)
        used = np.arange(manifest.seq_len) < rows.bounds[:, :, 0].sum(1, keepdims=True)
        counts += np.bincount(rows.ids[used], minlength=len(predicted))
    dataset.stop_fetching()  # shards that stay open are not removed from a cache
    return counts * predicted, len(chosen)

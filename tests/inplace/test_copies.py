"""Copies of the training state in memory: which one ranks continue from, and what is in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert.common.errors import Failed
from megabert.config import CheckpointConfig
from megabert.distributed.ranks import World
from megabert.engine import Snapshot
from megabert.engine.zero_layout import ParameterSlice
from megabert.inplace import kept_rank
from megabert.inplace.copies import Copies, NewestCopy
from tests.helpers.ranks import run_ranks

SIZE = 6
KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Partition:
    """A rank's share of the parameter `w`: element i of a kind is 100 x the place + 10 x the kind + i."""

    def __init__(self, world: World, cursor: int) -> None:
        self.first, self.count, self.cursor = SIZE * world.rank // world.size, SIZE // world.size, cursor

    def snapshot(self) -> Snapshot:
        parts = {kind: whole(self.cursor, kind)[self.first :][: self.count] for kind in KINDS}
        weights = [ParameterSlice("w", self.first, {"weight": parts.pop("weight")})]
        return Snapshot({"w": (2, 3)}, weights, [ParameterSlice("w", self.first, parts)], {"optimizer_steps": 1})


def whole(cursor: int, kind: str) -> torch.Tensor:
    return 100.0 * cursor + 10 * KINDS.index(kind) + torch.arange(float(SIZE))


def opened(world: World, folder: str, host: str) -> Copies:
    place = Path(folder, str(world.rank))
    place.mkdir(exist_ok=True)
    (place / kept_rank.PORT).write_text(str(7000 + world.rank))  # as its keeper does
    os.environ |= {kept_rank.KEEPER_DIR_ENV: str(place), "SLURMD_NODENAME": host}
    return Copies(place, Path(folder, "run"), world, CheckpointConfig().copy_every)


def take(
    world: World, folder: str, cursors: list[int], interrupted_save: tuple[int, int] | None = None
) -> list[list[int]]:
    """The places of the copies that a rank has after each one; `interrupted_save`: step and place of a save that is in flight all the time."""
    copies, found = opened(world, folder, f"n{world.rank}"), []
    for cursor in cursors:
        copies.take(Partition(world, cursor), {"cursor": cursor, "step": cursor - 1}, interrupted_save)
        assert copies._last is not None and copies._writing is not None
        copies._writing.join()
        Path(folder, str(world.rank), kept_rank.DELIVERED).write_text(str(copies._last))  # as its keeper does
        found.append(sorted(copy.cursor for copy in kept_rank.copies_in(Path(folder, str(world.rank)))))
    return found


Content = tuple[dict[str, Any], dict[str, list[float]]]


def newest(world: World, folder: str, *afters: int) -> list[Content | None]:
    copies = (opened(world, folder, "n0").newest(after, []) for after in afters or (-1,))
    return [copy and content(copy) for copy in copies]


def content(copy: NewestCopy, interrupted_save: bool = False) -> Content:
    assert copy.counters == {"optimizer_steps": 1} and copy.tensors.shapes == {"w": [2, 3]}
    assert interrupted_save or copy.interrupted_save is None
    return copy.state, {kind: tensor.tolist() for kind, _, tensor in copy.tensors.gather_all(*KINDS)}


def expected(cursor: int, size: int) -> Content:
    state = {"cursor": cursor, "step": cursor - 1, "world_size": size}
    return state, {kind: whole(cursor, kind).tolist() for kind in KINDS}


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taken")
    assert run_ranks(2, take, str(folder), [5, 6, 7]) == [[[5], [5, 6], [6, 7]]] * 2
    return folder


@pytest.fixture
def two_ranks(taken: Path, tmp_path: Path) -> Path:
    """The folders of two ranks with copies at the places 5, 6 and 7, of which the last two are kept."""
    return Path(shutil.copytree(taken, tmp_path, dirs_exist_ok=True))


def files(folder: Path, rank: int) -> list[Path]:
    return sorted((folder / str(rank)).glob("*.safetensors"))


def test_ranks_continue_from_the_newest_copy(two_ranks: Path) -> None:
    assert run_ranks(2, newest, str(two_ranks), -1, 6, 7) == [[expected(7, 2), expected(7, 2), None]] * 2


def newest_and_owed(world: World, folder: str, saved: list[int]) -> tuple[Content, Content | None, list[int]]:
    copy = opened(world, folder, "n0").newest(-1, saved)
    assert copy is not None
    places = sorted(copy.cursor for copy in kept_rank.copies_in(Path(folder, str(world.rank))))
    return content(copy, interrupted_save=True), copy.interrupted_save and content(copy.interrupted_save), places


def test_copy_of_a_checkpoint_is_kept_until_saved(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert run_ranks(2, take, folder, [5, 6, 7, 8], (4, 5)) == [[[5], [5, 6], [5, 6, 7], [5, 7, 8]]] * 2
    assert run_ranks(2, newest_and_owed, folder, []) == [(expected(8, 2), expected(5, 2), [5, 8])] * 2
    assert run_ranks(2, newest_and_owed, folder, [4]) == [(expected(8, 2), None, [8])] * 2


def test_save_of_the_newest_copy_is_owed_too(tmp_path: Path) -> None:
    run_ranks(1, take, str(tmp_path), [5, 6], (5, 6))
    assert run_ranks(1, newest_and_owed, str(tmp_path), []) == [(expected(6, 1), expected(6, 1), [6])]


def test_copies_that_miss_a_part_are_removed(two_ranks: Path) -> None:
    """Rank 0's newest copy has no other part any more; it would be newer than all that is trained from the older one on."""
    (two_ranks / "0" / f".{files(two_ranks, 0)[-1].name}").touch()  # the rank was killed while it wrote this
    for left, names in ((expected(6, 2), ["000000000006"]), (None, [])):
        files(two_ranks, 1)[-1].unlink()
        assert run_ranks(2, newest, str(two_ranks)) == [[left]] * 2
        assert [[path.name[:12] for path in files(two_ranks, rank)] for rank in (0, 1)] == [names] * 2


def test_parts_are_read_by_whoever_holds_them(two_ranks: Path) -> None:
    """Each rank has the other's, then one rank those of both."""
    for mine, other in zip(files(two_ranks, 0), files(two_ranks, 1), strict=True):
        shutil.move(mine, two_ranks / "1")
        shutil.move(other, two_ranks / "0")
    assert run_ranks(2, newest, str(two_ranks)) == [[expected(7, 2)]] * 2
    for file in files(two_ranks, 1):
        shutil.copy(file, two_ranks / "0")
    assert run_ranks(1, newest, str(two_ranks)) == [[expected(7, 2)]]


def take_in_vain(world: World, folder: str) -> str:
    copies = opened(world, folder, "n0")
    shutil.rmtree(Path(folder, "0"))
    copies.take(Partition(world, 1), {"cursor": 1})
    with pytest.raises(Failed) as found:
        copies.take(Partition(world, 2), {"cursor": 2})
    return str(found.value)


def test_copy_too_large_for_memory_ends_the_run(tmp_path: Path) -> None:
    (text,) = run_ranks(1, take_in_vain, str(tmp_path))
    assert "no copy of the training state" in text and "without --in-place" in text

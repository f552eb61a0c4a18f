"""Copies of the training state in memory: every rank's slices in its keeper's folder and in that of a keeper on another host.

A copy is written while training continues, and the next one begins when all ranks' copies have arrived at their peers: of any two
neighbouring copies one is whole, whichever host is lost. Ranks that were started again in place continue from the newest copy that the
folders of all of them hold together, by any number of ranks, as they would from a checkpoint.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabert.checkpoint.manifest import index_slices
from megabert.checkpoint.store import BackgroundTask
from megabert.checkpoint.tensors import GROUPS, StoredTensors, named, open_file
from megabert.common.environment import host_name
from megabert.common.errors import Failed
from megabert.common.files import write_tensors
from megabert.common.logs import log
from megabert.distributed import keeper
from megabert.distributed.keeper import CopyName, Generation, Member
from megabert.distributed.ranks import World

if TYPE_CHECKING:
    from megabert.engine import Engine, Snapshot

# Seconds between two looks at what the keeper has sent, and until it counts as not sent.
LOOK, SENT_WITHIN = 0.005, 120.0


@dataclass(frozen=True)
class NewestCopy:
    """The newest whole copy: the state saved with it, the engine's counters, and its tensors."""

    state: dict[str, Any]
    counters: dict[str, Any]
    tensors: StoredTensors


class Copies:
    """The copies of one rank. All methods but `due` are collectives."""

    def __init__(self, folder: Path, run_dir: Path, world: World, every: int) -> None:
        """`folder`: the keeper's. The first ranks introduce their keepers to each other."""
        self._folder, self._world, self._every = folder, world, every
        generation = Generation.read(folder)
        if generation is None:
            address = keeper.address_here(world.master) if world.master else "localhost"
            places = world.gather([host_name(), address, int(os.environ[keeper.PORT])])
            name = world.broadcast(secrets.token_hex(8))
            generation = Generation(name, tuple(Member(*place) for place in places))
            if world.is_main:  # of an earlier job
                shutil.rmtree(run_dir / keeper.IN_PLACE, ignore_errors=True)
            (folder / keeper.RANK).write_text(str(world.rank))
            generation.write(folder)
        self._generation = generation
        self._peer = generation.peer_of(world.rank)
        self._writing: BackgroundTask | None = None
        self._last: CopyName | None = None

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def take(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Copy this moment's training state, once the copy before has arrived everywhere. Raises Failed where memory does not
        hold it."""
        if self._last is not None:
            self._finish(self._last)
            self._world.barrier()
            for copy in keeper.copies_in(self._folder):
                if copy.cursor < self._last.cursor:
                    (self._folder / str(copy)).unlink()
        name = CopyName(int(state["cursor"]), self._world.rank, self._world.size, self._generation.name)
        snapshot = engine.snapshot()
        self._writing = BackgroundTask(f"copy-{name.cursor}", partial(self._write, name, snapshot, dict(state)))
        self._last = name

    def _finish(self, name: CopyName) -> None:
        """Wait until a copy is written and at this rank's peer."""
        assert self._writing is not None
        self._writing.join()
        if self._writing.failure is not None:
            raise Failed(
                f"{self._folder}: no copy of the training state ({self._writing.problem}); give it more memory, or train "
                "without --in-place"
            )
        delivered, started = self._folder / keeper.DELIVERED, time.monotonic()
        while self._peer is not None and not (delivered.exists() and delivered.read_text() == str(name)):
            if time.monotonic() - started > SENT_WITHIN:
                raise Failed(f"host {self._peer.host} did not take a copy of the training state in {SENT_WITHIN:.0f} s")
            time.sleep(LOOK)

    def _write(self, name: CopyName, snapshot: Snapshot, state: dict[str, Any]) -> None:
        slices = [*snapshot.weights, *snapshot.moments]
        about = {
            "held": [(part.name, part.offset, part.length) for part in snapshot.weights],
            "single": sorted({part.name for part in snapshot.moments if len(part.values) == 1}),
            "shapes": snapshot.shapes,
            "counters": snapshot.counters,
            "state": state,
        }
        part = self._folder / f".{name}"
        write_tensors(part, named(slices), {"copy": json.dumps(about)})
        os.replace(part, self._folder / str(name))

    def newest(self, after: int) -> NewestCopy | None:
        """The newest copy of which the ranks hold every part together, of a place in the data behind `after`; None where there is
        none."""
        held = self._world.gather([list(copy) for copy in keeper.copies_in(self._folder)])
        holders: dict[tuple[int, str, int], dict[int, int]] = {}
        for holder, copies in enumerate(held):
            for cursor, rank, size, generation in copies:
                holders.setdefault((cursor, generation, size), {}).setdefault(rank, holder)
        whole = [key for key, ranks in holders.items() if len(ranks) == key[2] and key[0] > after]
        if not whole:
            if parts_of := max((key for key in holders if key[0] > after), default=None):
                missing = sorted(set(range(parts_of[2])) - holders[parts_of].keys())
                log.info(f"copies in memory: the parts of ranks {missing} are lost; the newest checkpoint is taken")
            return None
        cursor, generation, size = newest = max(whole)
        own = [rank for rank, holder in holders[newest].items() if holder == self._world.rank]
        files = {rank: open_file(self._folder, str(CopyName(cursor, rank, size, generation))) for rank in own}
        about = {rank: json.loads(file.metadata()["copy"]) for rank, file in files.items()}
        parts: dict[str, Any] = {}
        for found in self._world.gather({str(rank): [one["held"], one["single"]] for rank, one in about.items()}):
            parts |= found
        # what is the same on every rank, as rank 0 wrote it
        first = self._world.gather(about.get(0))[holders[newest][0]]
        tensors = StoredTensors(
            index_slices(first["shapes"], [parts[str(rank)][0] for rank in range(size)]),
            {name for _, single in parts.values() for name in single},
            {(group, rank): file for rank, file in files.items() for group in GROUPS.values()},
            self._world,
        )
        return NewestCopy(first["state"] | {"world_size": size}, first["counters"], tensors)


def copies_of_keeper(run_dir: Path, world: World, every: int) -> Copies | None:
    """The copies of a rank that has a keeper. A collective."""
    folder = os.environ.get(keeper.FOLDER)
    return Copies(Path(folder), run_dir, world, every) if folder else None

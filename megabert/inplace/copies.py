"""Copies of the training state in memory: each rank's slices in its keeper's folder and in that of a keeper on another host.

A copy is written while training continues. The next one starts only when every rank's copy has reached its peer, so
after the loss of any one host at least one of the last two copies is complete. Restarted ranks resume from the newest
complete copy; like a checkpoint it can be read by any number of ranks. The copy of a checkpoint's state is kept until
that checkpoint is committed, so that an interrupted save can be repeated.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabert.checkpoint.format import GROUPS, StoredTensors, describe_slices, index_slices, named, open_file
from megabert.common.background import BackgroundTask
from megabert.common.environment import host_name
from megabert.common.errors import Failed
from megabert.common.files import write_tensors
from megabert.common.logs import log
from megabert.distributed.ranks import World, on_every_rank
from megabert.inplace import kept_rank
from megabert.inplace.kept_rank import CopyName, Generation, Member

if TYPE_CHECKING:
    from megabert.engine import Engine, Snapshot

LOOK, SENT_WITHIN = 0.005, 120.0  # seconds between checks whether the keeper has sent a copy, and the timeout


@dataclass(frozen=True)
class NewestCopy:
    """The newest complete copy: the state saved with it, the engine's counters, and its tensors."""

    state: dict[str, Any]
    counters: dict[str, Any]
    tensors: StoredTensors
    interrupted_save: NewestCopy | None = None  # the state of a checkpoint whose save was interrupted


Key = tuple[int, str, int]  # data cursor, generation and number of ranks of a copy


class Copies:
    """The copies of one rank. All methods except `due` are collectives."""

    def __init__(self, folder: Path, run_dir: Path, world: World, every: int) -> None:
        """`folder`: the keeper's folder; `every`: updates between copies. The ranks of the first start exchange their keepers'
        addresses."""
        self._folder, self._world, self._every = folder, world, every
        generation = Generation.read(folder)
        if generation is None:
            address = on_every_rank(world, partial(kept_rank.listen, folder, world.master))
            places = world.gather([host_name(), *address])
            name, secret = world.broadcast([secrets.token_hex(8), secrets.token_hex(16)])
            generation = Generation(name, secret, tuple(Member(*place) for place in places), world.rank)
            if world.is_main:  # left by an earlier job
                shutil.rmtree(run_dir / kept_rank.IN_PLACE, ignore_errors=True)
            generation.write(folder)
        self._generation = generation
        self._peer = generation.find_peer()
        self._writing: BackgroundTask | None = None
        self._last: CopyName | None = None

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def take(self, engine: Engine, state: Mapping[str, Any], interrupted_save: tuple[int, int] | None = None) -> None:
        """Start a copy of the training state, after the previous one has arrived everywhere. `interrupted_save`: step and data cursor of the
        save in flight, whose copy is kept. Raises Failed if the copy does not fit into memory."""
        name = CopyName(int(state["cursor"]), self._world.rank, self._world.size, self._generation.name)
        if self._last is not None:
            if name == self._last:
                return
            self._finish(self._last)
            self._world.barrier()
            for copy in kept_rank.copies_in(self._folder):
                if copy.cursor < self._last.cursor and (interrupted_save is None or copy.cursor != interrupted_save[1]):
                    (self._folder / str(copy)).unlink()
        write = partial(self._write, name, engine.snapshot(), dict(state), interrupted_save)
        self._writing = BackgroundTask(f"copy-{name.cursor}", write)
        self._last = name

    def _finish(self, name: CopyName) -> None:
        """Wait until a copy is written and this rank's peer has received it."""
        assert self._writing is not None
        self._writing.join()
        if self._writing.failure is not None:
            raise Failed(
                f"{self._folder}: no copy of the training state was written ({self._writing.problem}); "
                "give that file system more space, or train without --in-place"
            )
        started = time.monotonic()
        while self._peer is not None and kept_rank.delivered(self._folder) != str(name):
            if time.monotonic() - started > SENT_WITHIN:
                raise Failed(
                    f"host {self._peer.host} did not receive a copy of the training state within {SENT_WITHIN:.0f} s"
                )
            time.sleep(LOOK)

    def _write(
        self, name: CopyName, snapshot: Snapshot, state: dict[str, Any], interrupted_save: tuple[int, int] | None
    ) -> None:
        held, single = describe_slices(snapshot)
        metadata = {
            "held": held,
            "single": single,
            "shapes": snapshot.shapes,
            "counters": snapshot.counters,
            "state": state,
            "interrupted_save": interrupted_save,
        }
        part = self._folder / f".{name}"
        file = write_tensors(part, named([*snapshot.weights, *snapshot.moments]), {"copy": json.dumps(metadata)})
        kept_rank.publish_copy(self._folder, part, name, file["sha256"])

    def newest(self, after: int, saved: Collection[int]) -> NewestCopy | None:
        """The newest complete copy with a data cursor beyond `after`, or None; deletes all other copies.

        `interrupted_save` has the state of the save in flight when the copy was taken, unless its step is among the `saved` ones.
        """
        copies_by_holder = self._world.gather([list(copy) for copy in kept_rank.copies_in(self._folder)])
        # of each copy: the rank that wrote a file -> the rank that reads it
        holders: dict[Key, dict[int, int]] = {}
        for holder, copies in enumerate(copies_by_holder):
            for cursor, rank, size, generation in copies:
                holders.setdefault((cursor, generation, size), {}).setdefault(rank, holder)
        complete = {key: ranks for key, ranks in holders.items() if len(ranks) == key[2]}
        newest, interrupted_save = max((key for key in complete if key[0] > after), default=None), None
        if newest is not None:
            copy, save = self._read(newest, complete[newest])
            if save is not None and save[0] not in saved:
                interrupted_save = next((key for key in complete if key[0] == save[1]), None)
            if interrupted_save == newest:
                copy = replace(copy, interrupted_save=copy)
            elif interrupted_save is not None:
                copy = replace(copy, interrupted_save=self._read(interrupted_save, complete[interrupted_save])[0])
        elif incomplete := max((key for key in holders if key[0] > after), default=None):
            missing = sorted(set(range(incomplete[2])) - holders[incomplete].keys())
            log.info(f"resuming from the newest checkpoint: the in-memory copies of ranks {missing} are lost")
        for name in kept_rank.copies_in(self._folder):
            if (name.cursor, name.generation, name.size) not in (newest, interrupted_save):
                (self._folder / str(name)).unlink()
        for part in self._folder.glob(".*.safetensors"):  # of a rank that ended while it wrote
            part.unlink()
        return copy if newest is not None else None

    def _read(self, key: Key, holders: Mapping[int, int]) -> tuple[NewestCopy, tuple[int, int] | None]:
        """A complete copy, and step and cursor of the save that was in flight. `holders`: the rank that wrote a file -> the rank that
        reads it."""
        cursor, generation, size = key
        writers = [rank for rank, holder in holders.items() if holder == self._world.rank]
        files = {rank: open_file(self._folder, str(CopyName(cursor, rank, size, generation))) for rank in writers}
        metadata = {rank: json.loads(file.metadata()["copy"]) for rank, file in files.items()}
        parts: dict[str, Any] = {}
        for local in self._world.gather({str(rank): [m["held"], m["single"]] for rank, m in metadata.items()}):
            parts |= local
        # shapes, state and counters are equal on all ranks: those that rank 0 wrote
        first = self._world.gather(metadata.get(0))[holders[0]]
        tensors = StoredTensors(
            self._folder,
            index_slices(first["shapes"], [parts[str(rank)][0] for rank in range(size)]),
            {name for _, single in parts.values() for name in single},
            {(group, rank): file for rank, file in files.items() for group in GROUPS.values()},
            self._world,
        )
        return NewestCopy(first["state"] | {"world_size": size}, first["counters"], tensors), first["interrupted_save"]


def copies_of_keeper(run_dir: Path, world: World, every: int) -> Copies | None:
    """The copies of a rank that has a keeper, otherwise None. A collective."""
    folder = os.environ.get(kept_rank.KEEPER_DIR_ENV)
    return Copies(Path(folder), run_dir, world, every) if folder else None

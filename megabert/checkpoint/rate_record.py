"""Record of the learning rates that were read from the clock: an update that is done again takes the rate it had.

`learning_rates.bin` in the run's folder has one record an update: its step and its number in the data (after a rollback a
step has other data), the seconds trained before it, its rate, and a CRC-32 of these, of what the rates follow from and of
what makes it another run. Rank 0 writes it as the update begins. Records that do not match, torn ones or those of other
settings or of another model in the same folder, count as absent.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

from megabert.checkpoint.start import FREE
from megabert.common.canonical_json import canonical
from megabert.config import Config
from megabert.distributed.process_group import World

FILE = "learning_rates.bin"
RECORD = struct.Struct("<qqddI")  # step, number in the data, seconds, rate, CRC-32 of the rest
VALUES = RECORD.size - 4


class RateRecord:
    """Seconds and rates of a run's updates from `first` on, by step and number in the data. Opening it is a collective."""

    def __init__(self, run_dir: Path, config: Config, world: World, first: int, writes: bool) -> None:
        """`writes`: false for a replay, which only reads."""
        self._path, self._writes = run_dir / FILE, writes and world.is_main
        rates = {"schedule": config.schedule.model_dump(), "lr": config.optimizer.lr}
        self._settings = zlib.crc32(canonical(rates | _identity(config)))
        # what was recorded before it had an identity: where a checkpoint, or a replay, says that this is the run
        self._accepted = {self._settings, *([zlib.crc32(canonical(rates))] if first or not writes else [])}
        found = world.broadcast(self._read(first) if world.is_main else None)
        self._known = {(step, cursor): (seconds, rate) for step, cursor, seconds, rate in found}

    def _read(self, first: int) -> list[Any]:
        data = self._path.read_bytes() if self._path.exists() else b""
        found = []
        for start in range(0, len(data) - RECORD.size + 1, RECORD.size):
            *values, crc = RECORD.unpack_from(data, start)
            right = (zlib.crc32(data[start : start + VALUES], settings) for settings in self._accepted)
            if values[0] >= first and crc in right:
                found.append(values)
        return found

    def known(self, step: int, cursor: int) -> tuple[float, float] | None:
        """Seconds trained before an update, and its rate, where it was done before."""
        return self._known.get((step, cursor))

    def add(self, step: int, cursor: int, seconds: float, rate: float) -> None:
        """An update that begins."""
        if not self._writes:
            return
        values = RECORD.pack(step, cursor, seconds, rate, 0)[:VALUES]
        with open(self._path, "ab") as file:
            torn = file.tell() % RECORD.size
            file.truncate(file.tell() - torn)
            file.write(values + zlib.crc32(values, self._settings).to_bytes(4, "little"))


def _identity(config: Config) -> dict[str, Any]:
    """What a run cannot change. Fields of the model at their defaults are left out: later versions have more of them."""
    model = config.model.model_dump(exclude_defaults=True, exclude=set(FREE))
    return {
        "model": model,
        "global_size": config.batch.global_size,
        "optimizer": config.optimizer.name,
        "precision": config.precision,
        "seed": config.seed,
    }

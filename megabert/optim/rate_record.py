"""Record of learning rates that depend on the training time, so that a repeated update uses the same rate.

`learning_rates.bin` in the run folder has a record per update: its step and its data cursor (after a rollback a step has other
data), the training time before it in seconds, its rate, and a CRC-32 of these and of the settings that determine the rates. Rank
0 appends it before the update. Incomplete records and records of other settings are ignored.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from megabert.common.files import add_path_when_full, canonical
from megabert.config import Config
from megabert.distributed.ranks import World, on_main

FILE = "learning_rates.bin"
RECORD = struct.Struct("<qqddI")  # step, data cursor, seconds, rate, CRC-32 of the other fields


class RateRecord:
    """Training times and rates of a run's updates from step `first` on. The constructor is a collective."""

    def __init__(self, run_dir: Path, config: Config, world: World, first: int, fresh: bool = False) -> None:
        """`fresh`: the run has no checkpoint, so existing records are removed."""
        self._path, self._writes = run_dir / FILE, world.is_main
        phases = [phase.model_dump() for phase in config.phases]
        settings = {"schedule": config.schedule.model_dump(), "lr": config.optimizer.lr, "phases": phases}
        self._settings = zlib.crc32(canonical(settings))
        if fresh and self._writes:
            self._path.unlink(missing_ok=True)
        known = on_main(world, lambda: self._read(first))
        self._known = {(step, cursor): (seconds, rate) for step, cursor, seconds, rate in known}

    def _read(self, first: int) -> list[list[float]]:
        data = self._path.read_bytes() if self._path.exists() else b""
        records = RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size])
        return [values for *values, crc in records if values[0] >= first and crc == self._crc(*values)]

    def _crc(self, *values: float) -> int:
        return zlib.crc32(RECORD.pack(*values, 0)[: RECORD.size - 4], self._settings)

    def known(self, step: int, cursor: int) -> tuple[float, float] | None:
        """Training time before an update in seconds, and its rate; None if the update was not done before."""
        return self._known.get((step, cursor))

    def add(self, step: int, cursor: int, seconds: float, rate: float) -> None:
        """Append the record of an update. On rank 0 only."""
        if self._writes:
            values = (step, cursor, seconds, rate)
            with add_path_when_full(self._path), open(self._path, "ab") as file:
                file.truncate(file.tell() // RECORD.size * RECORD.size)
                file.write(RECORD.pack(*values, self._crc(*values)))

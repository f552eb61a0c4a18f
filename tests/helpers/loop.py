"""What a trainer is opened with in tests of its loop: tiny updates, and a stop that is asked for when a test says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from megabert.config import Config
from megabert.data.batch import Update
from megabert.distributed.ranks import World
from megabert.engine import Engine
from megabert.metrics import PretrainingMeter
from tests.helpers import tiny


class StopAt:
    """A stop that is requested at the n-th question, or never. Unlike `Stop`, it leaves this process' signals alone."""

    def __init__(self, question: int = -1, seconds: Callable[[], float] = lambda: math.inf) -> None:
        """`seconds`: time that is left."""
        self.left, self.seconds = question, seconds

    @property
    def seconds_left(self) -> float:
        return self.seconds()

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left == 0

    def record_update(self, seconds: float) -> None:
        """It reads no clock."""

    record_save = record_upload = record_update


def make_spike(trainer: Any, at: int, seen: list[tuple[int, int, list[int]]]) -> None:
    """From here on the loss of update `at` of the data is 50 times as high; phase, number and rows of each update go to `seen`."""
    engine = trainer.engine
    usual, train_update = engine._weights, engine.train_update

    def spiked(update: Update, *rest: Any) -> Any:
        engine._weights = usual * (50.0 if update.step == at else 1.0)
        seen.append((len(trainer.state.phase_starts), update.step, update.row_ids.tolist()))
        return train_update(update, *rest)

    engine.train_update = spiked


class Killed(Exception):
    """The end of a process."""


class Workload:
    """`count` tiny updates, made beforehand, behind which the process ends; saved at one step, never evaluated."""

    samples = ()

    def __init__(self, cfg: Config, world: World, engine: Engine, count: int, saved_at: int) -> None:
        self.made = [tiny.update(step, cfg, world) for step in range(count)]
        self.saved_at = saved_at
        self.meter = PretrainingMeter(world, cfg.model, engine.terms, 1.0)

    def updates(self, first: int, phase_starts: Any) -> Iterator[Update]:
        yield from self.made[first:]
        raise Killed

    def evaluation_due(self, step: int) -> bool:
        return False

    def checkpoint_due(self, step: int) -> bool:
        return step == self.saved_at

    def evaluate(self, step: int, progress: Any) -> dict[str, float]:
        return {}

    def progress_line(self, values: Any, eta: float) -> str:
        return ""

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, saved: Any) -> None: ...

"""Interface of a workload, pre-training or fine-tuning, to the Trainer: what it trains on and is judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from megabert.engine import UpdateResult
from megabert.training.sinks import Shown


class Update(Protocol):
    """This rank's part of one update: micro-batches for the engine, and which rows of the data they hold."""

    step: int  # its number in the data, from 0
    epoch: int
    batches: list[Any]
    objective: str  # what it trains; losses of different ones are not compared
    row_ids: np.ndarray
    epochs: np.ndarray
    tokens: int  # real ones of this rank, without padding
    damage: dict[int, str]
    problem: str
    problem_code: int  # the exit code that goes with it


class Updates(Protocol):
    """An endless iterator over updates that lets go of its workers when closed."""

    def __next__(self) -> Any: ...
    def close(self) -> None: ...


class Meter(Protocol):
    """Figures of the updates between two log lines."""

    @property
    def counts(self) -> list[int]: ...
    def add(self, result: UpdateResult, update: Any) -> None: ...
    def passed(self, seconds: float) -> None: ...
    def drain(self, counts: Sequence[int]) -> dict[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def resume(self, saved: Mapping[str, Any] | None) -> None: ...


class Workload(Protocol):
    """What is trained on and judged by. All methods are called on every rank at the same moment."""

    @property
    def meter(self) -> Meter:
        """Figures of the updates between two log lines."""

    def updates(self, first: int, share_used: Callable[[int], float]) -> Updates:
        """This rank's updates from number `first` of the data on. `share_used(number)`: how much of the run's budget is used
        before an update, exactly for the next one and as far as is known for those behind it."""

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after `step` updates, the end of the schedule aside; step 0 is before the first one."""

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after `step` updates, the end aside."""

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Figures of the model after `step` updates, logged and given; {} where there is nothing to evaluate on. `progress` is
        called now and then, for the watchdog."""

    @property
    def shown(self) -> Shown:
        """What the newest evaluation looked at besides its figures."""

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        """One line for the terminal from the values of a log line."""

    @property
    def satisfied(self) -> bool:
        """Whether to end before the schedule does."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the workload, as JSON."""

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""

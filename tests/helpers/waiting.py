"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout: float = 30, state: Callable[[], object] = str) -> None:
    """Returns once `condition` holds; after `timeout` seconds the test fails, and `state` says why."""
    end, pause = time.monotonic() + timeout, 0.01
    while not condition():
        assert time.monotonic() < end, f"not within {timeout:.0f} s: {state()}"
        time.sleep(pause)
        pause = min(2 * pause, 0.2)

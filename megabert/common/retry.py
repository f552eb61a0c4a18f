"""Another try at what a file system failed to do for a reason that may pass: EIO, ESTALE, a time-out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from megabert.common import errors
from megabert.common.logs import log

T = TypeVar("T")
WAITS = (0.1, 1.0, 5.0)  # seconds before each further try


def tried_again(action: Callable[[], T]) -> T:
    """What `action` gives; tried again after growing waits while it raises an OSError that another start may help.

    The last try's error is raised, and at once one that the user must change (no such file, no permission).
    """
    for wait in WAITS:
        try:
            return action()
        except OSError as error:
            if errors.exit_code(error) != errors.FAILED:
                raise
            log.warning(f"{errors.describe(error)}: tried again in {wait:g} s")
            time.sleep(wait)
    return action()

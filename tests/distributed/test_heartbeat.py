"""What a rank says of its main thread."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

from megabert.distributed import hangs
from megabert.distributed.ranks import wait_for_ranks


def test_a_rank_that_waits_for_a_collective_begun_earlier_is_no_hanging_one() -> None:
    """The wait is in C, so its innermost Python code is ours and not torch's."""
    seen: list[tuple[str, bool]] = []
    looks = threading.Timer(0.1, lambda: seen.append(hangs.main_thread()))
    looks.start()
    wait_for_ranks(SimpleNamespace(wait=partial(time.sleep, 0.3)))  # type: ignore[arg-type]
    looks.join()
    assert seen[0][1] and "ranks.py" in seen[0][0]
    looks = threading.Timer(0.1, lambda: seen.append(hangs.main_thread()))
    looks.start()
    time.sleep(0.3)
    looks.join()
    assert not seen[1][1]

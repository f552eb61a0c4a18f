"""Meeting of keepers after a rank was killed (`train --in-place`): what N keepers read, list and connect to for one restart.

Keepers are the real ones, each a process; their ranks are this file: they introduce themselves, hand over a copy of a few bytes,
and wait. One is killed, and the ranks of the next generation end at once. Counts are of Python's audit events in the keepers,
from the kill on.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# this file runs as a script with the working directory anywhere
sys.path.insert(0, str(ROOT))

from megabert.distributed import signals  # noqa: E402
from megabert.inplace import keeper, kept_rank  # noqa: E402
from megabert.inplace.kept_rank import CopyName, Generation, Member  # noqa: E402

LIMIT_SECONDS = 300.0
NAME = "0" * 16


def restart(ranks: int, per_node: int, folder: Path) -> dict[str, float]:
    """Kill one of so many ranks: counts of the keepers, and seconds until the last rank has started again."""
    folder.mkdir()
    processes = []
    for rank in range(ranks):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "WORLD_SIZE": str(ranks)}
        command = [sys.executable, __file__, str(folder), str(per_node)]
        processes.append(subprocess.Popen(command, env=os.environ | env))
    try:
        wait_for(lambda: len(list(folder.glob("ready-*"))) == ranks)
        (folder / "killed").touch()
        started = time.monotonic()
        os.kill(int((folder / f"ready-{ranks // 2}").read_text()), signal.SIGKILL)
        codes = [process.wait(LIMIT_SECONDS) for process in processes]
        again = [float(path.read_text()) - started for path in folder.glob("again-*")]
        if any(codes) or len(again) != ranks:
            raise ValueError(f"{ranks} keepers: {len(again)} ranks started again, exit codes {sorted(set(codes))}")
    finally:
        for process in processes:
            process.kill()
    counts = Counter[str]()
    for path in folder.glob("counts-*"):
        counts.update(json.loads(path.read_text()))
    names = ("files opened in the run folder", "listings of the run folder", "connections to keepers")
    found = {f"meeting of keepers: {name}": float(counts[name]) for name in names}
    return found | {"meeting of keepers: seconds to the last rank's start": max(again)}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ValueError(f"nothing happened within {LIMIT_SECONDS:g} s")
        time.sleep(0.02)


def keep(folder: Path) -> int:
    """The process of a keeper; it leaves its counts."""
    counts, run = Counter[str](), str(folder / "run")

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).startswith(run):
            counts["files opened in the run folder"] += 1
        elif event in ("os.listdir", "os.scandir", "glob.glob") and str(args[0]).startswith(run):
            counts["listings of the run folder"] += 1
        elif event == "socket.connect" and (folder / "killed").exists():
            counts["connections to keepers"] += 1

    sys.addaudithook(hook)
    code = keeper.keep(folder / "run")
    (folder / f"counts-{os.getpid()}").write_text(json.dumps(counts))
    return code


def be_a_rank(folder: Path, per_node: int) -> int:
    signals.leave_when_signalled()
    kept_rank.follow()
    kept_rank.wait_for_place()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = Path(os.environ[kept_rank.KEEPER_DIR_ENV])
    if Generation.read(own) is not None:
        leave(folder / f"again-{rank}", str(time.monotonic()))
        return 0
    leave(folder / f"place-{rank}", json.dumps([f"n{rank // per_node}", *kept_rank.listen(own, ("127.0.0.1", 9))]))
    wait_for(lambda: len(list(folder.glob("place-*"))) == ranks)
    places = [json.loads((folder / f"place-{other}").read_text()) for other in range(ranks)]
    Generation(NAME, "secret", tuple(Member(*place) for place in places), rank).write(own)
    (own / ".part").write_bytes(b"a copy")
    kept_rank.hand_over(own, own / ".part", CopyName(1, rank, ranks, NAME), hashlib.sha256(b"a copy").hexdigest())
    if ranks > per_node:
        wait_for(lambda: kept_rank.delivered(own) != "")
    leave(folder / f"ready-{rank}", str(os.getpid()))
    time.sleep(LIMIT_SECONDS)
    return 4


def leave(path: Path, text: str) -> None:
    """Write a file, which appears whole."""
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    shared, of_a_node = Path(sys.argv[1]), int(sys.argv[2])
    sys.exit(be_a_rank(shared, of_a_node) if signals.PLACE in os.environ else keep(shared))

"""Evidence of a hang and the verdict on it: where each rank stands, and which ranks the others wait for.

Ranks run one program, so in each process group they enter the same collectives in the same order. One that has entered
fewer than others blocks those; it is the cause unless it waits itself, in another group, for a third one. Where the counts
are equal, the collective that was entered decides, then the step, and last the stack.

A collective under NCCL returns at once, and the rank waits for it later wherever it reads a result, so that its stack does
not show which one it waits for. torch's counters and its flight recorder do, a process group each, for every library.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch.distributed as dist
from torch._C import _distributed_c10d

# This package; it may be installed among the libraries.
PACKAGE = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# Where ranks wait for each other.
COLLECTIVES = (f"torch{os.sep}distributed{os.sep}", f"deepspeed{os.sep}comm{os.sep}")
# `ranks.wait_for_ranks`, which waits for a collective that was started earlier.
WAITING = "wait_for_ranks"


@dataclass(frozen=True)
class Standing:
    """Where a rank stands."""

    rank: int
    # Updates done.
    step: int = 0
    # Its stack is in a collective.
    waiting: bool = False
    # Collectives entered, by process group.
    entered: dict[str, int] = field(default_factory=dict)
    # The oldest unfinished one, by process group.
    unfinished: dict[str, str] = field(default_factory=dict)


# -- evidence ----------------------------------------------------------------------------------------------------------


def entered() -> dict[str, int]:
    """How many collectives this process has entered in each of its process groups, finished or not."""
    world: Any = dist.distributed_c10d._world
    return {world.pg_names[group]: group._get_sequence_number_for_group() for group in list(world.pg_map)}


def unfinished() -> dict[str, str]:
    """Of each process group the oldest collective that was entered and is not finished, as text that is equal on ranks which
    entered the same one; a group without one is left out. Empty where the flight recorder is off (TORCH_FR_BUFFER_SIZE=0).
    Asks the device where there is one, which may take forever."""
    oldest: dict[str, str] = {}
    for dump in _dumps("_json"):
        for entry in json.loads(dump(True, True)).get("entries", ()):
            group, name = entry["process_group"][0], entry["profiling_name"]
            if entry["retired"] or entry["is_p2p"] or group in oldest:
                continue
            # the ranks' parts of an all-to-all may have any sizes
            sizes = f" of {entry['input_sizes']} {' '.join(entry['input_dtypes'])}"
            oldest[group] = name if "all_to_all" in name else name + sizes
    return oldest


def write_trace(path: Path) -> None:
    """The flight recorder's own file: the last 2,000 collectives, without their stacks, which take seconds to look up; under
    NCCL torch's `torchfrtrace` compares the ranks' files. Asks the device as `unfinished` does."""
    path.write_bytes(_dumps("")[0](True, False))


def _dumps(form: str) -> list[Callable[..., bytes]]:
    """torch's functions that dump the flight recorder: of NCCL, where it was built with it, and of gloo."""
    functions = (getattr(_distributed_c10d, f"_dump_{kind}_trace{form}", None) for kind in ("nccl", "fr"))
    return [function for function in functions if function is not None]


def main_thread() -> tuple[str, bool]:
    """(file:line in function, whether it waits for other ranks there) of the main thread's innermost frame that is no
    library's."""
    identity = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(identity or 0)
    if frame is None:
        return "gone", False
    code = frame.f_code
    waiting = code.co_name == WAITING or any(part in code.co_filename for part in COLLECTIVES)
    innermost = frame
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    shown = frame or innermost
    path = Path(shown.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{shown.f_lineno} in {shown.f_code.co_name}", waiting


def _is_library(file: str) -> bool:
    return not file.startswith(PACKAGE) and file.startswith((*LIBRARIES, "<"))


def pid_namespace() -> str:
    """A text that is equal for two processes exactly when each can see the other by its process id."""
    parts = [socket.gethostname()]
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", lambda p: Path(p).read_text().strip()),
        ("/proc/self/ns/pid", os.readlink),  # containers have process ids of their own
    ):
        try:
            parts.append(read(path))
        except OSError:
            parts.append(f"{os.getpid()}")  # not known: a text that no other process has
    return " ".join(parts)


def is_alive(pid: int) -> bool:
    """Whether a process that can be seen from here still runs or is stopped; one that only waits to be reaped is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


# -- verdict -----------------------------------------------------------------------------------------------------------


def find_failed_ranks(ranks: Sequence[Standing]) -> dict[int, str]:
    """The ranks that block the others, each with the reason; all ranks where no evidence distinguishes them."""
    return (
        _absent(ranks)
        or _in_another_collective(ranks)
        or _all_in_the_same(ranks)
        or _behind(ranks)
        or {one.rank: "and it does not wait for other ranks" for one in ranks if not one.waiting}
        or {one.rank: "and every rank waits for the others" for one in ranks}
    )


def _absent(ranks: Sequence[Standing]) -> dict[int, str]:
    """Those that have not entered what others wait in."""
    waits, missing = _waits(ranks)
    if not waits.any():
        return {}
    reach = _transitive_closure(waits)
    mutual = reach & reach.T | np.eye(len(ranks), dtype=bool)
    # Whoever the last ones wait for waits for them.
    last = ~(reach & ~mutual).any(axis=1)
    waiters = waits.sum(axis=0)
    reasons = {}
    for i in np.flatnonzero(last & (waiters > 0)).tolist():
        circle = mutual[i]
        if waiters[i] == waiters[circle].max():  # of ranks that wait for each other the one that most wait for
            group, count = missing[ranks[i].rank]
            names = Counter(one.unfinished[group] for one in ranks if group in one.unfinished)
            name = f" ({names.most_common(1)[0][0]})" if names else ""
            text = f"has not entered collective {count} of group {group}{name} that {waiters[i]} of {len(ranks)} ranks are in"
            if circle.sum() > 1:
                text += " but waits for them in another group: collectives in another order"
            if ranks[i].unfinished:
                other_group, collective = min(ranks[i].unfinished.items())
                text += f"; it is itself in {collective} of group {other_group}"
            reasons[ranks[i].rank] = text
    return reasons


def _waits(ranks: Sequence[Standing]) -> tuple[np.ndarray, dict[int, tuple[str, int]]]:
    """bool [n, n]: rank i has entered a collective that rank j, of those in its group, is the furthest from; and for each
    rank that is waited for (group, number) of what it has not entered."""
    waits = np.zeros((len(ranks), len(ranks)), dtype=bool)
    missing: dict[int, tuple[str, int]] = {}
    for group in sorted({name for one in ranks for name in one.entered}):
        members = np.array([group in one.entered for one in ranks])
        counts = np.array([one.entered.get(group, 0) for one in ranks])
        least = counts[members].min()
        ahead, behind = members & (counts > least), members & (counts == least)
        if ahead.any():
            waits |= ahead[:, None] & behind[None, :]
            for i in np.flatnonzero(behind).tolist():
                missing.setdefault(ranks[i].rank, (group, int(least) + 1))
    return waits, missing


def _transitive_closure(edges: np.ndarray) -> np.ndarray:
    """bool [n, n]: whether a path leads from i to j."""
    reach, size = edges, -1
    while reach.sum() != size:
        size = reach.sum()
        reach = reach | (reach.astype(np.float32) @ reach.astype(np.float32) > 0)
    return reach


def _in_another_collective(ranks: Sequence[Standing]) -> dict[int, str]:
    """A minority that entered another collective than the others did under the same number."""
    for group in sorted({name for one in ranks for name in one.unfinished}):
        names = Counter(one.unfinished[group] for one in ranks if group in one.unfinished)
        usual, count = names.most_common(1)[0]
        others = [one for one in ranks if one.unfinished.get(group, usual) != usual]
        if others and count > len(others):
            return {
                one.rank: f"entered {one.unfinished[group]} of group {group} where {count} of {len(ranks)} ranks entered {usual}"
                for one in others
            }
    return {}


def _all_in_the_same(ranks: Sequence[Standing]) -> dict[int, str]:
    """All, where all entered the same collectives and one does not finish."""
    if not all(one.unfinished for one in ranks):
        return {}
    group, name = min(ranks[0].unfinished.items())
    reason = f"in {name} of group {group}, which every rank has entered: a device, the network, or ranks that disagree"
    return {one.rank: reason for one in ranks}


def _behind(ranks: Sequence[Standing]) -> dict[int, str]:
    """Those that have done fewer updates."""
    least, most = min(one.step for one in ranks), max(one.step for one in ranks)
    if least == most:
        return {}
    return {one.rank: f"behind the others at step {most}" for one in ranks if one.step == least}

"""Collectives that this process has entered, by torch's own counters and its flight recorder.

A collective under NCCL returns at once, and the rank waits for it later wherever it reads a result, so that its stack does
not show which one it waits for. The counters do: torch keeps one a process group, for every library's collectives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d


def entered() -> dict[str, int]:
    """How many collectives this process has begun in each of its process groups, finished or not."""
    world: Any = dist.distributed_c10d._world
    return {world.pg_names[group]: group._get_sequence_number_for_group() for group in list(world.pg_map)}


def unfinished() -> dict[str, str]:
    """Of each process group the oldest collective that was begun and is not finished, as text that is equal on ranks which
    entered the same one; a group without one is left out. Empty where the flight recorder is off (TORCH_FR_BUFFER_SIZE=0).
    Asks the device where there is one, which may take forever."""
    found: dict[str, str] = {}
    for dump in _dumps("_json"):
        for entry in json.loads(dump(True, True)).get("entries", ()):
            group, name = entry["process_group"][0], entry["profiling_name"]
            if entry["retired"] or entry["is_p2p"] or group in found:
                continue
            # the ranks' parts of an all-to-all may have any sizes
            sizes = f" of {entry['input_sizes']} {' '.join(entry['input_dtypes'])}"
            found[group] = name if "all_to_all" in name else name + sizes
    return found


def write_trace(path: Path) -> None:
    """The flight recorder's own file: the last 2,000 collectives, without their stacks, which take seconds to look up; under
    NCCL torch's `torchfrtrace` compares the ranks' files. Asks the device as `unfinished` does."""
    path.write_bytes(_dumps("")[0](True, False))


def _dumps(form: str) -> list[Callable[..., bytes]]:
    """torch's functions that give what it recorded: of NCCL, where it was built with it, and of gloo."""
    functions = (getattr(_distributed_c10d, f"_dump_{kind}_trace{form}", None) for kind in ("nccl", "fr"))
    return [function for function in functions if function is not None]

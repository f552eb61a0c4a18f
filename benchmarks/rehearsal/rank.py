"""Ranks without arithmetic: counts of what a rank does, by the stage that it is in, of what it holds, and the engine.

Nothing of the project is changed for the counts: Python's audit events report files, `/proc/self/io` bytes and system calls, and
torch's own functions are wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megabert.checkpoint import format as checkpoint_format
from megabert.config import Config, accumulation
from megabert.distributed.ranks import World
from megabert.engine import Engine, UpdateResult
from megabert.engine.rank_times import ComputeTime
from megabert.engine.update_result import HostCopy
from megabert.engine.zero_layout import ZeroLayout, slice_of_group
from megabert.optim.build import build_optimizer

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce")
REQUESTS = ("set", "get", "multi_get", "check", "compare_set")
# audited besides "open": what else the metadata server of a file system is asked for by name
NAMES = {f"os.{name}" for name in ("listdir", "scandir", "mkdir", "rename", "remove", "rmdir")}


class Counts:
    """What this process has done so far, from one `enter` to the next."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places`: beginnings of paths, by the name under which their files are counted; "other" for the rest."""
        self._places, self._so_far, self._io = places, Counter[str](), os.open("/proc/self/io", os.O_RDONLY)
        # "seconds", "cpu seconds" (of all threads), "collectives", "opened: PLACE", ... of each stage, and the seconds of each
        # time that it was entered
        self.stages, self.seconds = defaultdict[str, Counter[str]](Counter), defaultdict[str, list[float]](list)
        sys.addaudithook(self._audit)
        for name in COLLECTIVES:
            setattr(dist, name, self._counting(getattr(dist, name), "collectives", "collective bytes"))
        for name in REQUESTS:
            setattr(dist.Store, name, self._counting(getattr(dist.Store, name), "store requests", f"store {name}"))
        # which opens files without Python
        opened = self._counting(checkpoint_format.safe_open, "opened: run", "opened: safetensors")
        setattr(checkpoint_format, "safe_open", opened)  # noqa: B010
        self._stage, self._before = "start", self._now()

    def enter(self, stage: str) -> None:
        """What is done from here on belongs to `stage`."""
        now = self._now()
        self.stages[self._stage].update({name: now[name] - self._before[name] for name in now})
        self.seconds[self._stage].append(now["seconds"] - self._before["seconds"])
        self._stage, self._before = stage, now

    def around(self, owner: Any, name: str, stage: str) -> None:
        """Let each call of a function be `stage`, and what follows it "between"."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            self.enter(stage)
            found = function(*args, **kwargs)
            self.enter("between")
            return found

        setattr(owner, name, entered)

    def _counting(self, function: Any, calls: str, more: str) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._so_far[calls] += 1
            self._so_far[more] += sum(map(size_of, args)) if more.endswith("bytes") else 1
            return function(*args, **kwargs)

        return counted

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self._so_far["processes started"] += 1
        elif event == "open" or event in NAMES:
            path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
            place = next((name for name, prefix in self._places.items() if path.startswith(prefix)), "other")
            self._so_far[f"{'opened' if event == 'open' else 'names'}: {place}"] += 1

    def _now(self) -> Counter[str]:
        lines = os.pread(self._io, 4096, 0).decode().splitlines()
        io = {name: int(number) for name, number in (line.split(": ") for line in lines)}
        calls = {"system calls": io["syscr"] + io["syscw"], "bytes read": io["rchar"], "bytes written": io["wchar"]}
        clocks: Any = {"seconds": time.perf_counter(), "cpu seconds": time.process_time()}
        return Counter(dict(self._so_far) | calls | clocks)


def size_of(value: Any) -> int:
    """Bytes of the tensors in an argument."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(size_of, value)) if isinstance(value, list) else 0


def descriptors() -> list[str]:
    """What the descriptors of this process are open on."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or another thread's
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return targets


def held(inherited: list[str]) -> dict[str, float]:
    """What this process holds at the moment, of descriptors those that it has not `inherited`. Memory: private, and PSS, in which
    what several processes share counts by shares."""
    rollup = Path("/proc/self/smaps_rollup").read_text().split()
    kib = {name: int(rollup[rollup.index(f"{name}:") + 1]) for name in ("Pss", "Private_Clean", "Private_Dirty")}
    opened = [target for target in descriptors() if target not in inherited]
    return {
        "descriptors": len(opened), "sockets": sum(target.startswith("socket:") for target in opened),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()), "threads": len(os.listdir("/proc/self/task")),
        "PSS MiB": kib["Pss"] / 1024, "private MiB": (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024,
    }  # fmt: skip


class RehearsedEngine(Engine):
    """An engine without DeepSpeed, forward and backward passes: this rank's partition of weights and moments at ZeRO stage 1,
    the collectives of an update but for the gradients', and the Engine's own snapshots and restores.

    Update 0 sets each weight to a number that follows from its place in the model. Every later update, also of another start
    and on other ranks, asserts that it still is.
    """

    def __init__(self, config: Config, model: Any, world: World, more: Mapping[str, Any] | None = None) -> None:
        """`model` builds the module, which gives the shapes and counts what a batch predicts."""
        self.config, self.world, self.dtype = config, world, torch.float32
        self.accumulation = accumulation(config, world.size)
        module = self.module = model()
        self.terms, self._counts, self.optimizer_kernels = module.terms, module.counts, "torch"
        self.optimizer = build_optimizer(config.optimizer, self.module)
        named = dict(self.module.named_parameters())
        index_of, masters = {id(parameter): index for index, parameter in enumerate(named.values())}, []
        for group in self.optimizer.param_groups:
            flat = torch.zeros(-(-sum(parameter.numel() for parameter in group["params"]) // world.size))
            masters.append(slice_of_group(flat, group["params"], world.rank, index_of))
            group["params"] = [flat]
        self.layout = ZeroLayout({name: p.shape for name, p in named.items()}, tuple(masters), partitioned=True)
        self.optimizer.attach({master.tensor: master.segments for master in masters}, world.device, world)
        self.compute_time, self._skipped = ComputeTime(world.device), torch.zeros((), dtype=torch.float64)
        self.progress: Callable[[], None] = lambda: None
        methods = dict.fromkeys(("set_train_micro_batch_size", "set_train_batch_size"), lambda size: None)
        self._deepspeed = SimpleNamespace(global_steps=0, global_samples=0, micro_steps=0, **methods)
        # (epoch, row id) of the rows that this rank was given
        self.rows: list[tuple[int, int]] = []

    def train_update(self, update: Any, lr: float, veto: Callable[[float], bool] | None = None) -> UpdateResult:
        """An update that changes no weight, with losses of 1."""
        for segment, flat in ((s, master.tensor) for master in self.layout.masters for s in master.segments):
            view = flat[segment.start : segment.end]
            expected = (torch.arange(segment.offset, segment.stop) % 4093 + segment.index).float()
            if update.step == 0:
                view.copy_(expected)
            assert torch.equal(view, expected), f"{self.layout.names[segment.index]} is not what was saved"
        self.rows += [(int(e), int(r)) for e, r in zip(update.epochs, update.row_ids, strict=True) if r >= 0]
        counts = [sum(parts) for parts in zip(*map(self._counts, update.batches), strict=True)]
        totals = self._sum_over_ranks(torch.tensor(counts, dtype=torch.float64))
        correct = self._sum_over_ranks(torch.zeros(2 * len(counts), dtype=torch.float64))[len(counts) :]
        losses, applied = torch.ones(len(counts), dtype=torch.float64), torch.ones(())
        norm = self.optimizer.guard([], 0.0)
        self.optimizer.resume([master.tensor for master in self.layout.masters], update.step + 1)
        self._deepspeed.global_steps += 1
        self.progress()
        return UpdateResult(
            loss=losses.sum(), losses=losses, correct=correct, counts=totals, grad_norm=norm, applied=applied, vetoed=False,
            host_loss=HostCopy(losses.sum()), host_applied=HostCopy(applied),
        )  # fmt: skip

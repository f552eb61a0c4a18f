"""Ranks of a run that never was: a checkpoint saved again as any number of ranks at any ZeRO stage would have saved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megabert.checkpoint.format import StoredTensors, read_manifest
from megabert.checkpoint.store import SAVING, Checkpoints, SaveInFlight
from megabert.common.background import BackgroundTask
from megabert.config import CheckpointConfig
from megabert.distributed.ranks import World
from megabert.engine import Snapshot
from megabert.engine.zero_layout import WEIGHT, Master, ParameterSlice, ZeroLayout, slice_of_group
from megabert.optim.guarded import MOMENTS, FlatSegment

ALONE = World(0, 0, 1, torch.device("cpu"), "gloo", "single")


def layout_of(
    shapes: Mapping[str, Sequence[int]], groups: Sequence[Sequence[str]], rank: int, ranks: int, stage: int
) -> ZeroLayout:
    """What DeepSpeed would give `rank`: a slice of each group at stages 1 and 2, of each parameter at 3, everything at 0."""
    index = {name: n for n, name in enumerate(shapes)}
    masters = []
    for group in groups:
        tensors = [torch.empty(tuple(shapes[name]), device="meta") for name in group]
        numbers = {id(tensor): index[name] for tensor, name in zip(tensors, group, strict=True)}
        if stage in (1, 2):
            size = -(-sum(tensor.numel() for tensor in tensors) // ranks)
            flat = torch.zeros(size)
            masters.append(slice_of_group(flat, tensors, rank, numbers))
            continue
        for tensor in tensors:
            size = -(-tensor.numel() // ranks) if stage == 3 else tensor.numel()
            begin = rank * size if stage == 3 else 0
            length = max(0, min(size, tensor.numel() - begin))
            held = (FlatSegment(numbers[id(tensor)], 0, length, begin),) if length else ()
            masters.append(Master(torch.zeros(size), held))
    return ZeroLayout({name: torch.Size(shape) for name, shape in shapes.items()}, tuple(masters), stage > 0)


def part_of(
    whole: Mapping[tuple[str, str], torch.Tensor],
    layout: ZeroLayout,
    world: World,
    kinds: Sequence[str],
    single: set[str],
) -> list[ParameterSlice]:
    """What a rank saves of `kinds`; the parameters in `single` have no second moment."""
    values = {}
    for number, master in enumerate(layout.masters):
        names = {layout.names[segment.index] for segment in master.segments}
        kept = [kind for kind in kinds if kind != MOMENTS[1] or not names <= single]
        values[number] = {kind: torch.zeros_like(master.tensor) for kind in kept}
        for s in master.segments:
            for kind, tensor in values[number].items():
                tensor.view(-1)[s.start : s.end] = whole[kind, layout.names[s.index]][s.offset : s.stop]
    return layout.copies(world, values)


def save_as(source: Path, run: Path, step: int, ranks: int, stage: int) -> Path:
    """The checkpoint `source` as so many ranks would have saved it, each its own part, as `step` of `run`."""
    manifest = read_manifest(source)
    stored, counters = StoredTensors.of_checkpoint(source, manifest, ALONE), manifest["engine"]
    whole = {(kind, name): tensor for kind, name, tensor in stored.gather_all(WEIGHT, *MOMENTS)}
    shapes = {name: tuple(shape) for name, shape in stored.shapes.items()}
    single = set(manifest["first_moment_only"])
    groups = [group for of in (True, False) if (group := [n for n in shapes if (n in single) == of])]
    folder = run / "checkpoints" / f"{SAVING}{step:08d}"
    for rank in reversed(range(ranks)):
        world = World(rank, rank, ranks, torch.device("cpu"), "gloo", "single")
        layout = layout_of(shapes, groups, rank, ranks, stage)
        weights, moments = (part_of(whole, layout, world, kinds, single) for kinds in ((WEIGHT,), MOMENTS))
        checkpoints = Checkpoints(run, world)
        checkpoints._write(folder, Snapshot(shapes, weights, moments, counters))
    checkpoints.settings = CheckpointConfig(keep=99, asynchronous=False)
    written = BackgroundTask("written", lambda: None)
    checkpoints._commit(
        SaveInFlight(folder, manifest["state"] | {"step": step}, counters, shapes, written, started=0.0)
    )
    return run / "checkpoints" / f"step-{step:08d}"

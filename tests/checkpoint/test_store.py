"""A resumed run is the run; the newest checkpoints stay; files are small, as safetensors writes them, and of the umask."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabert.checkpoint import Checkpoints, load_weights, store
from megabert.checkpoint.format import MOMENTS, WEIGHTS, file_name, index_slices, seal
from megabert.common.files import write_tensors
from megabert.config import CheckpointConfig, load
from megabert.distributed.ranks import World
from megabert.engine import Engine, Snapshot
from megabert.engine.zero_layout import ParameterSlice
from megabert.model import BertForPreTraining
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated_ranks import ALONE, save_as

# (precision, ZeRO stage, optimizer); the others are slow
USUAL = (("bf16", 0, "adamw"), ("fp32", 1, "lamb"), ("bf16", 2, "adamw"), ("bf16", 3, "muon"))
OTHERS = (
    *(("fp32", 0, "adamw"), ("fp32", 2, "adamw"), ("fp32", 3, "lamb"), ("bf16", 1, "lamb"), ("bf16", 3, "lamb")),
    *(("bf16", 0, "muon"), ("bf16", 1, "muon")),
)
WEIGHTS_FILE, MOMENTS_FILE = (f"{group}-00000-of-00001.safetensors" for group in ("weights", "moments"))


def state(step: int, cfg: Any, **more: Any) -> dict[str, Any]:
    data = {"dataset": "d" * 64, "phase_datasets": ["d" * 64], "tokenizer": "t" * 64}
    return {"step": step, "cursor": step, "seconds": 1.5, "config": cfg.model_dump()} | data | more


def settings(keep: int = 3, asynchronous: bool = False, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(keep=keep, asynchronous=asynchronous, **more)


class FakeEngine:
    """One parameter, `w`, of `value`; the moments are its halves, of value + 1 and value + 2."""

    def __init__(self, value: float = 0.0, size: int = 6) -> None:
        self.value, self.size = value, size

    def halves(self, **values: float) -> list[ParameterSlice]:
        half = self.size // 2
        filled = lambda: {kind: torch.full((half,), float(value)) for kind, value in values.items()}  # noqa: E731
        return [ParameterSlice("w", first, filled()) for first in (0, half)]

    def snapshot(self) -> Snapshot:
        moments = self.halves(exp_avg=self.value + 1, exp_avg_sq=self.value + 2)
        shapes = {"w": (2, self.size // 2)}
        return Snapshot(shapes, self.halves(weight=self.value), moments, {"optimizer_steps": 1})

    def restore(self, stored: Any, counters: Any) -> None:
        assert stored.shapes == {"w": [2, self.size // 2]} and counters == {"optimizer_steps": 1}
        kinds = ("weight", "exp_avg", "exp_avg_sq")
        found = {(kind, name): tensor.tolist() for kind, name, tensor in stored.gather_all(*kinds)}
        self.value = found["weight", "w"][0]
        assert found == {(kind, "w"): [self.value + n] * self.size for n, kind in enumerate(kinds)}


def saved_run(folder: Path, steps: Iterable[int] = (10, 20), **kwargs: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, ALONE, settings(**kwargs))
    for step in steps:
        checkpoints.save(FakeEngine(step), state(step, tiny.config()))
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def steps(folder: Path) -> list[int]:
    """Of the checkpoints, beside which there is nothing unfinished."""
    chain, pointer, *found = names(folder)
    assert (chain, pointer) == ("chain.jsonl", "pointer.json")
    return [int(name.removeprefix("step-")) for name in found]


def stored(folder: Path) -> float:
    return float(load_weights(folder)[0]["w"][0, 0])


def at_moments(write: Any) -> Any:
    """The store's writer with `write` in its place for a file of moments, which comes after the weights."""
    plain = store.write_slices
    return lambda path, slices: (write if path.name.startswith(MOMENTS) else plain)(path, slices)


def test_a_best_checkpoint_that_is_saved_again_is_always_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart that makes the save in flight again: `best` leads there at each moment."""
    checkpoints, rename, seen = saved_run(tmp_path, ()), os.rename, []
    checkpoints.save(FakeEngine(1), state(10, tiny.config(), best_step=10))

    def renamed(source: Path, goal: Path) -> None:
        rename(source, goal)
        seen.append((tmp_path / "best").exists())

    monkeypatch.setattr(os, "rename", renamed)
    checkpoints.save(FakeEngine(2), state(10, tiny.config(), best_step=10))
    assert seen and all(seen) and stored(tmp_path / "best") == 2
    assert steps(tmp_path) == [10]


def test_a_damaged_entry_of_the_chain_stops_no_save(tmp_path: Path) -> None:
    saved_run(tmp_path, (10,))
    entries = tmp_path / "checkpoints/chain.jsonl"
    entries.write_bytes(entries.read_bytes().replace(b'"logs"', b'"lofs"').replace(b'"sha256"', b'"sha25v"'))
    saved_run(tmp_path, (20,))
    assert steps(tmp_path) == [10, 20]


def straight_and_resumed(world: World, folder: str, cases: Any) -> dict[Any, Any]:
    """6 updates with dropout; and 3, a save that is written during the next, a new engine, a load, 3."""
    found: dict[str, Any] = {}
    for precision, stage, name in cases:
        dropout = {"model__dropout": 0.1, "model__attention_dropout": 0.1}
        cfg = tiny.config(precision=precision, zero__stage=stage, optimizer__name=name, **dropout)
        run = Checkpoints(Path(folder) / f"{precision}-{stage}-{name}", world, settings(asynchronous=True))
        first = tiny.engine(cfg, world)
        tiny.train(first, range(3))
        run.save(first, state(3, cfg))
        straight = tiny.train(first, range(3, 6))
        run.finish()
        second = tiny.engine(cfg, world, seed=2)  # other weights
        loaded = run.load(second, run.latest())
        resumed = tiny.train(second, range(3, 6))
        ends = [e.snapshot() for e in (first, second)]
        saved = run.latest()
        loaded_again = run.load(first, saved)  # a rollback
        stored, meta = load_weights(saved)
        found[precision, stage, name] = {
            "straight": straight,
            "resumed": resumed,
            "rolled back": tiny.train(first, range(3, 6)),
            "equal": equal(*ends),
            "state": loaded == loaded_again == state(3, cfg, world_size=2) == meta,
            "files": sorted(p.name for p in saved.iterdir()),
            "weights": sorted(stored) == sorted(second.layout.names),
        }
    return found


def equal(a: Snapshot, b: Snapshot) -> bool:
    tensors = [[tensor for part in (*s.weights, *s.moments) for tensor in part.values.values()] for s in (a, b)]
    return a.counters == b.counters and all(torch.equal(x, y) for x, y in zip(*tensors, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("cases", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=("usual", "others"))
def test_stop_and_resume_is_bit_equal(cases, tmp_path):
    expected = ["manifest.json"]
    expected += [f"{group}-{rank:05d}-of-00002.safetensors" for group in ("moments", "weights") for rank in range(2)]
    for found in run_ranks(2, straight_and_resumed, str(tmp_path), cases, timeout=480):
        for case in cases:
            run = found[case]
            assert run["resumed"] == run["straight"] == run["rolled back"], case
            assert run["equal"] and run["state"] and run["weights"] and run["files"] == expected, case


def files_opened(world: World, folder: str) -> dict[int, tuple[set[str], bool]]:
    """Files that this rank opens to resume from what 4, 8 and 16 ranks saved, and whether the state is what was saved."""
    cfg = tiny.config(zero__stage=2)
    first, second = (tiny.engine(cfg, world, seed) for seed in (7, 2))
    tiny.train(first, range(1))
    checkpoints = Checkpoints(Path(folder, "4"), world, settings())
    checkpoints.save(first, state(1, cfg))
    source = checkpoints.latest()
    assert source is not None
    opened, found = set[str](), {}
    names = lambda text: set(re.findall(rf"{folder}/\d+/checkpoints/step-\d+/(\S+)", text))  # noqa: E731
    sys.addaudithook(lambda event, args: opened.update(names(str(args[0]))) if event == "open" else None)
    for ranks in (4, 8, 16):
        if world.is_main and ranks > 4:
            save_as(source, Path(folder, str(ranks)), 1, ranks, 2)
        world.barrier()
        opened.clear()
        run = Checkpoints(Path(folder, str(ranks)), world)
        run.load(Mapped(second, opened, names), run.latest())  # type: ignore[arg-type]
        found[ranks] = set(opened), equal(first.snapshot(), second.snapshot())
    return found


class Mapped:
    """An engine that takes down the files of a checkpoint that are mapped while it is restored."""

    def __init__(self, engine: Engine, opened: set[str], names: Any) -> None:
        self.engine, self.opened, self.names = engine, opened, names

    def restore(self, stored: Any, counters: Any) -> None:
        self.engine.restore(stored, counters)
        self.opened |= self.names(Path("/proc/self/maps").read_text())


@pytest.mark.dist
def test_a_rank_opens_its_share_of_files(tmp_path):
    for rank, found in enumerate(run_ranks(4, files_opened, str(tmp_path))):
        for ranks, (opened, same) in found.items():
            assert same and len(opened - {"manifest.json"}) == 2 * ranks / 4, (rank, ranks, sorted(opened))
            assert ("manifest.json" in opened) == (rank == 0)


def test_the_newest_stay_and_abandoned_ones_are_removed(tmp_path):
    checkpoints = saved_run(tmp_path, (10, 20, 30, 40), keep=2)
    assert steps(tmp_path) == [30, 40]
    for value in (35, 99):  # the same step again replaces it
        checkpoints.save(FakeEngine(value), state(35, tiny.config()))
        assert stored(tmp_path) == value and steps(tmp_path) == [30, 35]
    saved_run(tmp_path / "every", range(10, 130, 10), keep=2, keep_every=50)
    assert steps(tmp_path / "every") == [50, 100, 110, 120]


def test_before_gives_the_newest_whole_one(tmp_path, capsys):
    checkpoints, folder = saved_run(tmp_path, (10, 20, 30)), tmp_path / "checkpoints"
    assert checkpoints.latest(9) is None
    for before, newest in ((10, 10), (19, 10), (20, 20), (29, 20), (30, 30), (99, 30)):
        assert checkpoints.latest(before) == folder / f"step-000000{newest}"
    (folder / "step-00000020" / MOMENTS_FILE).unlink()
    assert capsys.readouterr().err == ""
    assert checkpoints.latest(25).name == "step-00000010"
    assert "is missing: going back to step-00000010" in capsys.readouterr().err
    (folder / "step-00000010" / MOMENTS_FILE).unlink()
    with pytest.raises(ValueError, match="no usable checkpoint"):
        checkpoints.latest(25)


def test_weights_of_a_run_or_checkpoint_are_verified(tmp_path):
    saved_run(tmp_path)
    older, newest = (tmp_path / "checkpoints" / f"step-000000{step}" for step in (10, 20))
    assert (stored(tmp_path), stored(older), load_weights(older)[1]["step"]) == (20, 10, 10)
    with pytest.raises(ValueError, match="no checkpoint in it"):
        load_weights(tmp_path / "elsewhere")
    (newest / MOMENTS_FILE).unlink()
    assert stored(tmp_path) == 20  # which needs no moments
    (older / WEIGHTS_FILE).write_bytes((older / WEIGHTS_FILE).read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match="its SHA-256 differs from the manifest's"):
        load_weights(older)


def test_the_manifest_of_512_ranks_is_below_a_megabyte() -> None:
    """BERT-LARGE at stage 3, where every rank holds a slice of each parameter."""
    with torch.device("meta"):
        model = BertForPreTraining(load("large_phase1", ["model.vocab_size=30528"]).model)
    shapes, ranks = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, 512
    held: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        size = math.prod(shape)
        for rank, offset in enumerate(range(0, size, -(-size // ranks))):
            held[rank].append((name, offset, min(-(-size // ranks), size - offset)))
    assert sum(map(len, held)) > 100_000
    owners = [(group, rank) for group in (WEIGHTS, MOMENTS) for rank in range(ranks) if held[rank]]
    files = {file_name(group, rank, ranks): {"bytes": 10**9, "sha256": "0" * 64} for group, rank in owners}
    layout = {"ranks": ranks, "files": files, "parameters": index_slices(shapes, held), "first_moment_only": []}
    assert len(seal(layout, state(1, tiny.config()), {"optimizer_steps": 1})) < 1_000_000


def test_tensors_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(5.0), "ä:1": torch.arange(6).view(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
    tensors |= {"none": torch.zeros(0), "scalar": torch.tensor(2.5), "bytes": torch.arange(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    found = write_tensors(tmp_path / "ours", tensors, {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert found["bytes"] == (tmp_path / "ours").stat().st_size
    assert all(torch.equal(tensors[name], tensor) for name, tensor in load_file(tmp_path / "ours").items())


def test_files_have_the_umask_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved_run(tmp_path, (1,))
    finally:
        os.umask(before)
    for path in (tmp_path / "checkpoints").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path

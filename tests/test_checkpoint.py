"""A resumed run is the run; a checkpoint that is not whole is never used; a save that dies harms nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabert import checkpoint
from megabert.checkpoint import Checkpoints, check_compatible, load_weights
from megabert.distributed import World
from tests import tiny
from tests.ranks import run_ranks

ALONE = World(0, 0, 1, torch.device("cpu"), "gloo", "single")
CASES = [(precision, stage, "none") for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
CASES += [("fp32", 2, "cpu")]


def state(step: int, cfg: Any, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "seconds": 1.5,
        "config": cfg.model_dump(),
        "dataset": "d" * 64,
        "tokenizer": "t" * 64,
    } | more


# -- resume ------------------------------------------------------------------------------------------------------


def straight_and_resumed(world: World, folder: str) -> dict[str, Any]:
    """6 updates with dropout; and 3, a save, a new engine, a load, 3."""
    found: dict[str, Any] = {}
    for precision, stage, offload in CASES:
        name = "lamb" if stage in (1, 3) else "adamw"
        cfg = tiny.config(
            precision=precision, zero__stage=stage, zero__offload=offload, optimizer__name=name,
            model__dropout=0.1, model__attention_dropout=0.1,
        )  # fmt: skip
        run = Checkpoints(Path(folder) / f"{precision}-{stage}-{offload}", world, keep=2)
        first = tiny.engine(cfg, world)
        losses = tiny.train(first, range(3))
        saved = run.save(first, state(3, cfg))
        losses += tiny.train(first, range(3, 6))
        second = tiny.engine(cfg, world, seed=2)  # other weights, other random numbers
        loaded = run.load(second, run.latest())
        resumed = tiny.train(second, range(3, 6))
        ends = [e.consolidated_weights() for e in (first, second)]
        stored, meta = load_weights(saved)
        found[f"{precision} {stage} {offload}"] = {
            "straight": losses[3:],
            "resumed": resumed,
            "equal": all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True)),
            "state": loaded == state(3, cfg, world_size=2) == meta,
            "files": sorted(str(p.relative_to(saved)) for p in saved.rglob("*") if p.is_file()),
            "latest": (saved / "latest").exists() or (saved.parent / "latest").exists(),
            "weights": sorted(stored) == sorted(second.layout.names),
        }
    found["wrong starts"] = wrong_starts(world, str(Path(folder) / "fp32-2-none"))
    found["full disk"] = failing_rank(world, str(Path(folder) / "full"))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(2, straight_and_resumed, str(folder), timeout=240)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_stop_and_resume_is_bit_equal(case, runs):
    for found in runs[1]:
        run = found[" ".join(map(str, case))]
        assert run["resumed"] == run["straight"]
        assert run["equal"] and run["state"] and run["weights"]
        assert not run["latest"]
        assert {"manifest.json", "weights.safetensors", "random-00000.json", "random-00001.json"} <= set(
            run["files"]
        )
        assert not [f for f in run["files"] if f.endswith(".py")]


def wrong_starts(world: World, run: str) -> list[str]:
    problems = []
    for extra in ({"zero__stage": 1}, {"zero__stage": 2}, {"zero__offload": "cpu", "zero__stage": 2}):
        engine = SimpleNamespace(config=tiny.config(**extra), load=lambda path: None)
        checkpoints = Checkpoints(run, world)
        try:
            checkpoints.load(engine, checkpoints.latest())
            problems.append("")
        except ValueError as error:
            problems.append(str(error))
    return problems


@pytest.mark.dist
def test_another_world_or_stage_is_refused(runs):
    alone = wrong_starts(ALONE, str(runs[0] / "fp32-2-none"))
    assert all("saved with ranks 2, this run has 1" in p and "start with ranks 2" in p for p in alone)
    stages = runs[1][0]["wrong starts"]
    assert "saved with zero.stage 2, this run has 1" in stages[0]
    assert stages[1] == ""
    assert "saved with zero.offload none, this run has cpu" in stages[2]


# -- damage ------------------------------------------------------------------------------------------------------


class FakeEngine:
    """Writes three small files; its weights are one tensor."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.config = tiny.config()

    def save(self, folder: Path) -> list[Path]:
        (folder / "engine").mkdir()
        files = [folder / "engine" / "a.pt", folder / "engine" / "b.pt", folder / "random-00000.json"]
        for i, file in enumerate(files):
            file.write_bytes(bytes((int(self.value) + i + k) % 256 for k in range(100 + i)))
        return files

    def consolidated_weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.full((3, 2), self.value)}

    def load(self, folder: Path) -> None:
        self.value = float(load_weights(folder)[0]["w"][0, 0])


def saved_run(folder: Path, steps: tuple[int, ...] = (10, 20), keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, ALONE, keep)
    for step in steps:
        checkpoints.save(FakeEngine(step), state(step, tiny.config()))
    return checkpoints


def damages(path: Path):
    """Each bit flipped in turn at 40 spread places and the ends, each of 5 truncations, and the file gone."""
    data = path.read_bytes()
    places = sorted({0, len(data) - 1, *range(0, len(data), max(1, len(data) // 40))})
    for place in places:
        yield data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]
    for length in sorted({0, 1, len(data) // 2, len(data) - 1}):
        yield data[:length]
    yield data + b"\0"
    yield None


def test_every_damage_is_seen_and_the_one_before_is_used(tmp_path, capsys):
    checkpoints = saved_run(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000020"
    tried = 0
    for file in sorted(p for p in newest.rglob("*") if p.is_file()):
        whole = file.read_bytes()
        for damaged in damages(file):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            assert checkpoints.latest() == tmp_path / "checkpoints" / "step-00000010", (file, damaged)
            said = capsys.readouterr().err
            assert "going back to step-00000010" in said and file.name in said
            file.write_bytes(whole)
            tried += 1
        assert checkpoints.latest() == newest
    assert tried > 150
    shutil.rmtree(newest)
    assert checkpoints.latest() == tmp_path / "checkpoints" / "step-00000010"
    assert "step 20, the last one committed, is missing" in capsys.readouterr().err


def test_a_damaged_pointer_costs_nothing(tmp_path):
    checkpoints = saved_run(tmp_path)
    pointer = tmp_path / "checkpoints" / "pointer.json"
    for damaged in damages(pointer):
        pointer.unlink() if damaged is None else pointer.write_bytes(damaged)
        latest = checkpoints.latest()
        assert latest is not None and latest.name in ("step-00000020", "step-00000010")
        pointer.write_bytes(b"{}")


def test_an_older_manifest_is_checked_too(tmp_path):
    """A digit of the state changed, so that the JSON stays well formed, in a checkpoint that no pointer names."""
    checkpoints = saved_run(tmp_path)
    old = tmp_path / "checkpoints" / "step-00000010"
    manifest = old / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"seconds": 1.5', b'"seconds": 2.5'))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    with pytest.raises(ValueError, match=r"no checkpoint is whole .*step-00000010/manifest.json is damaged"):
        checkpoints.latest()


def test_no_checkpoint_is_none_but_none_whole_is_an_error(tmp_path):
    assert Checkpoints(tmp_path / "new", ALONE, 1).latest() is None
    checkpoints = saved_run(tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (folder / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint is whole .*weights.safetensors is missing"):
        checkpoints.latest()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000020")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000010")
    with pytest.raises(ValueError, match="step 20, the last one committed, is missing"):
        checkpoints.latest()


def test_the_newest_stay_and_abandoned_ones_go(tmp_path):
    checkpoints = saved_run(tmp_path, (10, 20, 30, 40), keep=2)
    names = lambda: sorted(p.name for p in (tmp_path / "checkpoints").iterdir())  # noqa: E731
    assert names() == ["pointer.json", "step-00000030", "step-00000040"]
    (tmp_path / "checkpoints" / "step-00000040" / "weights.safetensors").write_bytes(b"")
    assert checkpoints.latest().name == "step-00000030"
    checkpoints.save(FakeEngine(35), state(35, tiny.config()))
    assert names() == ["pointer.json", "step-00000030", "step-00000035"]
    checkpoints.save(FakeEngine(99), state(35, tiny.config()))  # the same step again replaces it
    assert float(load_weights(tmp_path)[0]["w"][0, 0]) == 99.0
    assert names() == ["pointer.json", "step-00000030", "step-00000035"]


# -- kills and full disks ----------------------------------------------------------------------------------------

CALLS = [(os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree"), (checkpoint, "file_sha256")]


def save_killed_at(folder: Path, call: int, step: int) -> bool:
    """Save `step`, with weights of 20, in a child that dies by SIGKILL at its call-th file-system call; False when it survived."""
    child = os.fork()
    if child == 0:
        left = [call]

        def deadly(function: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapped

        for module, name in CALLS:
            setattr(module, name, deadly(getattr(module, name)))
        Path.rename = deadly(Path.rename)  # type: ignore[method-assign]
        try:
            Checkpoints(folder, ALONE, 1).save(FakeEngine(20), state(step, tiny.config()))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("step", (20, 10), ids=("next", "same"))
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(step, tmp_path):
    """The only other checkpoint is step 10; saving step 10 again replaces it."""
    kept, killed = set(), 0
    for call in range(100):
        run = tmp_path / str(call)
        saved_run(run, (10,), keep=1)
        if not save_killed_at(run, call, step):
            break
        killed += 1
        checkpoints = Checkpoints(run, ALONE, 1)
        latest = checkpoints.latest()
        assert latest is not None
        value = float(load_weights(run)[0]["w"][0, 0])
        assert latest.name == ("step-00000010" if value == 10 else f"step-{step:08d}")
        kept.add(int(value))
        assert not list((run / "checkpoints").glob(".*"))  # cleaned when the run was opened again
        checkpoints.save(FakeEngine(30), state(30, tiny.config()))
        assert checkpoints.latest().name == "step-00000030"
    assert killed > 15 and kept == {10, 20}


def killed_rank(world: World, folder: str) -> None:
    cfg = tiny.config(zero__stage=2)
    engine = tiny.engine(cfg, world)
    checkpoints = Checkpoints(folder, world, 2)
    tiny.train(engine, range(1))
    checkpoints.save(engine, state(1, cfg))
    tiny.train(engine, range(1, 2))
    if world.rank == 1:
        write = engine._deepspeed.checkpoint_engine.save
        engine._deepspeed.checkpoint_engine.save = lambda *a: (
            write(*a),
            os.kill(os.getpid(), signal.SIGKILL),
        )
    checkpoints.save(engine, state(2, cfg))


def failing_rank(world: World, folder: str) -> str:
    """Rank 1's disk is full at the second save: every rank hears of it, and training could go on."""
    cfg = tiny.config(zero__stage=1)
    engine = tiny.engine(cfg, world)
    checkpoints = Checkpoints(folder, world, 2)
    checkpoints.save(engine, state(1, cfg))
    original = torch.save

    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    if world.rank == 1:
        torch.save = full
    try:
        checkpoints.save(engine, state(2, cfg))
        problem = ""
    except ValueError as error:
        problem = str(error)
    torch.save = original
    checkpoints.save(engine, state(3, cfg))
    return problem + "|" + checkpoints.latest().name


@pytest.mark.dist
def test_kill_of_one_rank_in_a_real_save_leaves_the_one_before(tmp_path):
    assert run_ranks(2, killed_rank, str(tmp_path)) == [-signal.SIGKILL] * 2
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]
    assert (tmp_path / "checkpoints" / ".saving-00000002").is_dir()
    assert Checkpoints(tmp_path, ALONE, 2).latest().name == "step-00000001"
    assert not (tmp_path / "checkpoints" / ".saving-00000002").exists()


@pytest.mark.dist
def test_a_full_disk_on_one_rank_is_one_line_on_all(runs):
    for found in runs[1]:
        problem, latest = found["full disk"].split("|")
        assert "rank 1" in problem and "No space left" in problem and "previous one is untouched" in problem
        assert latest == "step-00000003"


# -- compatibility and init_from ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dataset": "e" * 64}, "dataset fingerprint"),
        ({"tokenizer": "u" * 64}, "tokenizer SHA-256"),
        ({"model.layers": 3}, "model.layers"),
        ({"model.hidden": 64}, "model.hidden"),
        ({"model.norm": "pre"}, "model.norm"),
        ({"batch.global_size": 16}, "batch.global_size"),
        ({"optimizer.name": "lamb"}, "optimizer.name"),
        ({"precision": "bf16"}, "precision"),
        ({"seed": 1}, "seed"),
    ],
)
def test_a_resume_on_something_else_names_the_field(change, field):
    saved = state(1, tiny.config())
    current = json.loads(json.dumps(saved))
    (key, value), *_ = change.items()
    node = current if key in current else current["config"]
    *sections, leaf = key.split(".")
    for section in sections:
        node = node[section]
    old, node[leaf] = node[leaf], value
    with pytest.raises(ValueError, match="cannot resume") as caught:
        check_compatible(saved, current)
    assert all(text in str(caught.value) for text in (field, repr(value), repr(old)))


def test_what_may_change_on_a_resume():
    saved = state(1, tiny.config())
    for override in ({"batch__micro_size": 4}, {"model__dropout": 0.2}, {"schedule__total_steps": 20000},
                     {"optimizer__lr": 1.0}, {"checkpoint__keep": 9}):  # fmt: skip
        check_compatible(saved, state(5, tiny.config(**override)))


def test_weights_come_from_a_run_or_from_one_checkpoint_and_are_verified(tmp_path):
    saved_run(tmp_path, (10, 20))
    assert float(load_weights(tmp_path)[0]["w"][0, 0]) == 20.0
    weights, meta = load_weights(tmp_path / "checkpoints" / "step-00000010")
    assert float(weights["w"][0, 0]) == 10.0 and meta["step"] == 10
    with pytest.raises(ValueError, match="no checkpoint in it"):
        load_weights(tmp_path / "elsewhere")
    file = tmp_path / "checkpoints" / "step-00000010" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match="another SHA-256"):
        load_weights(tmp_path / "checkpoints" / "step-00000010")

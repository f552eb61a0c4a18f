"""A resumed run is the run; a checkpoint that is not whole is never used; none is an error and never step 0."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megabert.checkpoint import Checkpoints, load_weights
from megabert.common import retry
from megabert.common.canonical_json import canonical
from megabert.config import CheckpointConfig
from megabert.distributed.process_group import World
from megabert.engine.snapshot import Snapshot
from megabert.engine.zero_layout import Piece
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

ALONE = World(0, 0, 1, torch.device("cpu"), "gloo", "single")
CASES = [
    (precision, stage, "none", "lamb" if stage in (1, 3) else "adamw")
    for precision in ("fp32", "bf16")
    for stage in (0, 1, 2, 3)
]
CASES += [("fp32", 2, "cpu", "adamw"), ("fp16", 0, "none", "adamw"), ("fp16", 2, "none", "adamw")]
CASES += [("bf16", stage, "none", "muon") for stage in (0, 1, 3)]
MOMENTS_FILE = "moments-00000-of-00001.safetensors"


def state(step: int, cfg: Any, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "seconds": 1.5,
        "config": cfg.model_dump(),
        "dataset": "d" * 64,
        "tokenizer": "t" * 64,
    } | more


def settings(keep: int = 3, asynchronous: bool = False, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(keep=keep, asynchronous=asynchronous, **more)


class FakeEngine:
    """One parameter, `w`, of `value`; the moments are its halves, of value + 1 and value + 2."""

    def __init__(self, value: float = 0.0, size: int = 6) -> None:
        self.value, self.size = value, size

    def snapshot(self) -> Snapshot:
        half = self.size // 2
        whole = {"exp_avg": self.value + 1, "exp_avg_sq": self.value + 2}
        pieces = [
            Piece("w", first, {kind: torch.full((half,), float(value)) for kind, value in whole.items()})
            for first in (0, half)
        ]
        return Snapshot({"w": torch.full((2, half), float(self.value))}, pieces, {"optimizer_steps": 1})

    def restore(self, weights: Any, read_moment: Any, counters: Any, average: Any) -> None:
        self.value = float(weights["w"][0, 0])
        for kind, more in (("exp_avg", 1), ("exp_avg_sq", 2)):
            into = torch.zeros(self.size - 2)  # across the pieces
            read_moment(kind, "w", 1, into)
            assert into.tolist() == [self.value + more] * (self.size - 2)


def saved_run(folder: Path, steps: Iterable[int] = (10, 20), **kwargs: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, ALONE, settings(**kwargs))
    for step in steps:
        checkpoints.save(FakeEngine(step), state(step, tiny.config()))
    return checkpoints


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors"])
def test_a_file_that_could_not_be_read_at_once_is_tried_again_before_an_older_one_is_taken(
    name, tmp_path, monkeypatch
):
    saved_run(tmp_path)
    failures = [OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)]
    whole = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.name == name and failures:
            raise failures.pop()
        return whole(path, **options)

    monkeypatch.setattr(retry, "WAITS", (0.0,))
    monkeypatch.setattr(Path, "stat", stat)
    assert Checkpoints(tmp_path, ALONE).latest().name == "step-00000020"


# -- resume ------------------------------------------------------------------------------------------------------


def straight_and_resumed(world: World, folder: str) -> dict[str, Any]:
    """6 updates with dropout; and 3, a save that is written during the next, a new engine, a load, 3."""
    from tests.engine.test_deepspeed_engine import allow_fp16

    allow_fp16()
    found: dict[str, Any] = {}
    for precision, stage, offload, name in CASES:
        cfg = tiny.config(
            precision=precision, zero__stage=stage, zero__offload=offload, optimizer__name=name,
            model__dropout=0.1, model__attention_dropout=0.1,
        )  # fmt: skip
        run = Checkpoints(
            Path(folder) / f"{precision}-{stage}-{offload}-{name}", world, settings(asynchronous=True)
        )
        first = tiny.engine(cfg, world)
        losses = tiny.train(first, range(3))
        run.save(first, state(3, cfg))
        losses += tiny.train(first, range(3, 6))
        saved = run.finish()
        second = tiny.engine(cfg, world, seed=2)  # other weights
        loaded = run.load(second, run.latest())
        resumed = tiny.train(second, range(3, 6))
        ends = [e.snapshot() for e in (first, second)]
        loaded_again = run.load(first, run.latest())  # an engine that has gone on comes back
        stored, meta = load_weights(saved)
        found[f"{precision} {stage} {offload} {name}"] = {
            "straight": losses[3:],
            "resumed": resumed,
            "rolled back": tiny.train(first, range(3, 6)),
            "equal": equal(*ends),
            "state": loaded == loaded_again == state(3, cfg, world_size=2) == meta,
            "files": sorted(p.name for p in saved.iterdir()),
            "weights": sorted(stored) == sorted(second.layout.names),
        }
    return found


def equal(a: Snapshot, b: Snapshot) -> bool:
    tensors = [
        [*s.weights.values(), *(tensor for piece in s.pieces for tensor in piece.moments.values())]
        for s in (a, b)
    ]
    return a.counters == b.counters and all(torch.equal(x, y) for x, y in zip(*tensors, strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(2, straight_and_resumed, str(tmp_path_factory.mktemp("runs")), timeout=240)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_stop_and_resume_is_bit_equal(case, runs):
    for found in runs:
        run = found[" ".join(map(str, case))]
        assert run["resumed"] == run["straight"] == run["rolled back"]
        assert run["equal"] and run["state"] and run["weights"]
        moments = [f"moments-{rank:05d}-of-00002.safetensors" for rank in range(2 if case[1] else 1)]
        assert run["files"] == ["manifest.json", *moments, "weights.safetensors"]


# -- damage ------------------------------------------------------------------------------------------------------


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
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        for damaged in damages(file):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            assert checkpoints.latest() == tmp_path / "checkpoints" / "step-00000010", (file, damaged)
            said = capsys.readouterr().err
            assert "going back to step-00000010" in said and file.name in said
            file.write_bytes(whole)
            tried += 1
        assert checkpoints.latest() == newest
    assert tried > 130
    engine = FakeEngine()
    assert checkpoints.load(engine, newest)["step"] == 20 and engine.value == 20
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
    assert Checkpoints(tmp_path / "new", ALONE, settings()).latest() is None
    checkpoints = saved_run(tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (folder / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint is whole .*weights.safetensors is missing"):
        checkpoints.latest()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000020")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000010")
    with pytest.raises(ValueError, match="step 20, the last one committed, is missing"):
        checkpoints.latest()


def reseal(folder: Path, change: Any) -> None:
    """Apply `change` to a manifest and give it a right SHA-256 again, as someone who forges it would."""
    file = folder / "manifest.json"
    body = json.loads(file.read_bytes())
    body.pop("sha256")
    change(body)
    file.write_bytes(canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()}))


def rename_file(name: str) -> Any:
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop(MOMENTS_FILE)

    return change


def set_pieces(pieces: Any) -> Any:
    def change(body: dict[str, Any]) -> None:
        body["files"][MOMENTS_FILE]["pieces"] = pieces

    return change


FORGERIES = {
    "a path": (rename_file("../../secret"), "which is no file of a checkpoint"),
    "a folder": (
        rename_file("engine/moments-00000-of-00001.safetensors"),
        "which is no file of a checkpoint",
    ),
    "an absolute path": (rename_file("/etc/passwd"), "which is no file of a checkpoint"),
    "another kind": (rename_file("model.pt"), "which is no file of a checkpoint"),
    "other pieces": (set_pieces({"w": [[0, 2], [2, 4]]}), "holds other pieces than the manifest lists"),
    "an unknown name": (set_pieces({"w": [[0, 3], [3, 3]], "x": [[0, 1]]}), "holds other pieces"),
    "no list": (set_pieces({"w": "all"}), "manifest.json cannot be read"),
    "no numbers": (set_pieces({"w": [[0, "3"], [3, 3]]}), "manifest.json cannot be read"),
    "a negative size": (
        lambda body: body["files"][MOMENTS_FILE].update(bytes=-1),
        "manifest.json cannot be read",
    ),
    "no pieces": (lambda body: body["files"][MOMENTS_FILE].pop("pieces"), "holds other pieces"),
    "no counters": (lambda body: body.update(engine=[]), "manifest.json cannot be read"),
    "no state": (lambda body: body.update(state=[]), "manifest.json holds no state"),
    "another layout": (lambda body: body.update(schema=9), "has layout 9"),
    "no weights": (lambda body: body["files"].pop("weights.safetensors"), "names no weights.safetensors"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_damage(name, tmp_path, capsys):
    change, message = FORGERIES[name]
    checkpoints = saved_run(tmp_path)
    reseal(tmp_path / "checkpoints" / "step-00000020", change)
    assert checkpoints.latest() == tmp_path / "checkpoints" / "step-00000010"
    assert message in capsys.readouterr().err


def test_a_link_is_not_followed_and_a_size_is_checked_before_a_byte_is_read(tmp_path, capsys):
    checkpoints = saved_run(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000020"
    for name in ("weights.safetensors", "manifest.json"):
        moved = tmp_path / f"elsewhere-{name}"
        (newest / name).rename(moved)
        (newest / name).symlink_to(moved)
        assert checkpoints.latest().name == "step-00000010"
        assert f"{name} is not a plain file" in capsys.readouterr().err
        (newest / name).unlink()
        moved.rename(newest / name)
    with (newest / MOMENTS_FILE).open("r+b") as file:
        file.truncate(1 << 43)  # 8 TiB of nothing: hashing it would take hours
    assert checkpoints.latest().name == "step-00000010"
    assert f"has {1 << 43} bytes" in capsys.readouterr().err


def test_a_checkpoint_of_the_first_layout_gives_its_weights_only(tmp_path):
    """DeepSpeed's pickles are never opened; the line names what can be done."""
    folder = tmp_path / "checkpoints" / "step-00000010"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "states.pt").write_bytes(b"never read")
    save_file({"w": torch.full((2, 3), 4.0)}, folder / "weights.safetensors")
    data = (folder / "weights.safetensors").read_bytes()
    files = {
        "weights.safetensors": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "engine/states.pt": {"bytes": 10, "sha256": "0" * 64},
    }
    body = {"schema": 1, "files": files, "state": {"step": 10}}
    (folder / "manifest.json").write_bytes(
        canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()})
    )
    with pytest.raises(ValueError, match=r"earlier version .*layout 1.*init_from=.*step-00000010"):
        Checkpoints(tmp_path, ALONE).latest()
    for source in (tmp_path, folder):
        weights, meta = load_weights(source)
        assert weights["w"].tolist() == [[4.0] * 3] * 2 and meta == {"step": 10}


# -- which stay ----------------------------------------------------------------------------------------------------


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


def test_multiples_of_keep_every_stay_for_ever(tmp_path):
    saved_run(tmp_path, range(10, 130, 10), keep=2, keep_every=50)
    steps = sorted(int(p.name[5:]) for p in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == [50, 100, 110, 120]


def test_before_gives_the_newest_whole_one_that_is_not_later(tmp_path, capsys):
    checkpoints = saved_run(tmp_path, (10, 20, 30))
    name = lambda step: getattr(checkpoints.before(step), "name", None)  # noqa: E731
    assert [name(s) for s in (9, 10, 19, 20, 29, 30, 99)] == [
        None, *(f"step-000000{s}" for s in (10, 10, 20, 20, 30, 30))
    ]  # fmt: skip
    (tmp_path / "checkpoints" / "step-00000020" / MOMENTS_FILE).unlink()
    assert capsys.readouterr().err == ""
    assert name(25) == "step-00000010"
    assert "is missing: going back to step-00000010" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "step-00000010" / MOMENTS_FILE).unlink()
    with pytest.raises(ValueError, match="no checkpoint is whole"):
        checkpoints.before(25)


# -- init_from ----------------------------------------------------------------------------------


def test_weights_come_from_a_run_or_from_one_checkpoint_and_are_verified(tmp_path):
    saved_run(tmp_path, (10, 20))
    assert float(load_weights(tmp_path)[0]["w"][0, 0]) == 20.0
    weights, meta = load_weights(tmp_path / "checkpoints" / "step-00000010")
    assert float(weights["w"][0, 0]) == 10.0 and meta["step"] == 10
    with pytest.raises(ValueError, match="no checkpoint in it"):
        load_weights(tmp_path / "elsewhere")
    (tmp_path / "checkpoints" / "step-00000020" / MOMENTS_FILE).unlink()
    assert float(load_weights(tmp_path)[0]["w"][0, 0]) == 20.0  # which needs no moments
    file = tmp_path / "checkpoints" / "step-00000010" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match="another SHA-256"):
        load_weights(tmp_path / "checkpoints" / "step-00000010")

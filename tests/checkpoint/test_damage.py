"""A checkpoint that is not whole is never used; none is an error and never step 0; one of a later version stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megabert.checkpoint import Checkpoints, load_weights
from megabert.checkpoint.format import SCHEMA, SEAL
from megabert.common.files import sealed
from megabert.distributed.ranks import World
from tests.checkpoint.test_store import MOMENTS_FILE, WEIGHTS_FILE, FakeEngine, names, saved_run, settings, state, steps
from tests.helpers import runs, tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated_ranks import ALONE


def damages(path: Path):
    """Each bit flipped in turn at 40 spread places and the ends, each of 5 truncations, and the file gone."""
    data = path.read_bytes()
    for place in sorted({len(data) - 1, *range(0, len(data), max(1, len(data) // 40))}):
        yield data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]
    yield from (data[:length] for length in {0, 1, len(data) // 2, len(data) - 1})
    yield data + b"\0"
    yield None


def test_every_damage_is_seen_and_an_older_one_used(tmp_path, capsys):
    checkpoints = saved_run(tmp_path)
    older, newest = (tmp_path / "checkpoints" / f"step-000000{step}" for step in (10, 20))
    tried = 0
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        for damaged in damages(file):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            assert checkpoints.latest() == older, (file, damaged)
            errors = capsys.readouterr().err
            assert "going back to step-00000010" in errors and file.name in errors
            file.write_bytes(whole)
            tried += 1
        assert checkpoints.latest() == newest
    assert tried > 130
    engine = FakeEngine()
    assert checkpoints.load(engine, newest)["step"] == 20 and engine.value == 20
    (newest / WEIGHTS_FILE).unlink()
    assert checkpoints.latest() == older
    checkpoints.save(FakeEngine(3), state(20, tiny.config()))
    assert checkpoints.latest() == newest
    (damaged,) = (tmp_path / "checkpoints").glob("damaged-00000020-*")  # not removed
    assert (damaged / MOMENTS_FILE).is_file()
    capsys.readouterr()
    shutil.rmtree(newest)
    assert checkpoints.latest() == older
    assert "step 20, the last one committed, is missing" in capsys.readouterr().err


def test_a_damaged_pointer_costs_nothing(tmp_path):
    checkpoints, pointer = saved_run(tmp_path), tmp_path / "checkpoints" / "pointer.json"
    for damaged in damages(pointer):
        pointer.unlink() if damaged is None else pointer.write_bytes(damaged)
        assert checkpoints.latest().name in ("step-00000020", "step-00000010")
        pointer.write_bytes(b"{}")


def test_no_whole_checkpoint_is_an_error(tmp_path):
    assert Checkpoints(tmp_path / "new", ALONE, settings()).latest() is None
    checkpoints = saved_run(tmp_path)
    folders = list((tmp_path / "checkpoints").glob("step-*"))
    for folder in folders:
        (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match=rf"no usable checkpoint .*{WEIGHTS_FILE} is missing"):
        checkpoints.latest()
    for folder in folders:
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="step 20, the last one committed, is missing"):
        checkpoints.latest()


def reseal(file: Path, change: Any) -> None:
    """Apply `change` to a manifest and give it a right SHA-256 again, as someone who forges it would."""
    body = json.loads(file.read_bytes())
    body.pop(SEAL)
    change(body)
    file.write_bytes(sealed(body, SEAL))


set_slices = lambda *runs: lambda body: body["parameters"]["w"].update(pieces=runs)  # noqa: E731
OTHER_FILES = "its fields 'files' and 'parameters' disagree"
FORGERIES = [
    (lambda body: body["files"].update({"../secret": body["files"].pop(MOMENTS_FILE)}), f"{OTHER_FILES} ('../secret')"),
    (lambda body: body["engine"].update(optimizer_steps=0), f"{OTHER_FILES} ('{MOMENTS_FILE}')"),
    (lambda body: body["files"].pop(WEIGHTS_FILE), f"{OTHER_FILES} ('{WEIGHTS_FILE}')"),
    (lambda body: body["parameters"].pop("w"), OTHER_FILES),
    (lambda body: body.update(ranks=10**12), OTHER_FILES),
    (set_slices([0, 1, 2], [0, 1, 4]), "its tensors differ from those that the manifest lists"),
    (set_slices([0, 1, 3]), "its tensors differ"),
    (lambda body: body["parameters"].update(x={"shape": [1], "pieces": [[0, 1, 1]]}), "its tensors differ"),
    (lambda body: body.update(first_moment_only=["w"]), "its tensors differ"),
    (set_slices([0, 1, "3"], [0, 1, 3]), "manifest.json cannot be read"),
    (lambda body: body.update(schema=2), "unsupported format 2, expected 3"),
]


def test_a_forged_manifest_is_damage(tmp_path, capsys):
    checkpoints = saved_run(tmp_path)
    manifest = tmp_path / "checkpoints" / "step-00000020" / "manifest.json"
    whole = manifest.read_bytes()
    for change, message in FORGERIES:
        manifest.write_bytes(whole)
        reseal(manifest, change)
        assert checkpoints.latest() == tmp_path / "checkpoints" / "step-00000010", message
        assert message in capsys.readouterr().err


def test_a_damaged_checkpoint_is_none_of_those_kept(tmp_path):
    saved_run(tmp_path, (10, 20))
    (tmp_path / "checkpoints/step-00000020/manifest.json").write_bytes(b"{")
    checkpoints = Checkpoints(tmp_path, ALONE, settings(keep=2))
    assert checkpoints.latest() == tmp_path / "checkpoints/step-00000010"
    checkpoints.save(FakeEngine(24), state(24, tiny.config()))
    kept = names(tmp_path)
    assert [name for name in kept if name.startswith("step-")] == ["step-00000010", "step-00000024"]
    assert sum(name.startswith("damaged-00000020-") for name in kept) == 1


def refusal(world: World, run: str) -> str:
    with pytest.raises(ValueError) as refused:
        Checkpoints(run, world, settings()).latest()
    return str(refused.value)


def test_a_newer_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run")
    reseal(run / "checkpoints/step-00000000/manifest.json", lambda body: body.update(schema=SCHEMA + 1))
    newer = f"has format {SCHEMA + 1} of a later MegaBERT; this version reads up to {SCHEMA}: update MegaBERT"
    first, second = run_ranks(2, refusal, str(run))
    assert newer in first and first == second
    assert steps(run) == [0]  # nothing is renamed
    with pytest.raises(ValueError, match="of a later MegaBERT"):
        load_weights(run)


def test_links_and_sizes_are_refused_before_reading(tmp_path, capsys):
    checkpoints = saved_run(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000020"
    for name in (WEIGHTS_FILE, "manifest.json"):
        moved = tmp_path / f"elsewhere-{name}"
        (newest / name).rename(moved)
        (newest / name).symlink_to(moved)
        assert checkpoints.latest().name == "step-00000010"
        assert f"{name} is not a regular file" in capsys.readouterr().err
        (newest / name).unlink()
        moved.rename(newest / name)
    with (newest / MOMENTS_FILE).open("r+b") as file:
        file.truncate(1 << 43)  # 8 TiB of nothing: hashing it would take hours
    assert checkpoints.latest().name == "step-00000010"
    assert f"has {1 << 43} bytes" in capsys.readouterr().err

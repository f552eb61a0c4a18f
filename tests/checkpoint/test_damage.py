"""A checkpoint that is not whole is never used; none is an error and never step 0. Earlier layouts are read."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megabert.checkpoint import Checkpoints, load_weights
from megabert.common.canonical_json import canonical
from tests.checkpoint.test_store import ALONE, MOMENTS_FILE, WEIGHTS_FILE, FakeEngine, saved_run, settings


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
        (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match=rf"no checkpoint is whole .*{WEIGHTS_FILE} is missing"):
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
        for name, runs in pieces.items():
            shape = [2, 3] if name == "w" else [1]
            body["parameters"][name] = {"shape": shape, "pieces": runs}

    return change


FORGERIES = {
    "a path": (rename_file("../../secret"), "which is no file of a checkpoint"),
    "a folder": (rename_file("engine/moments-00000-of-00001.safetensors"), "which is no file of a checkpoint"),
    "an absolute path": (rename_file("/etc/passwd"), "which is no file of a checkpoint"),
    "another kind": (rename_file("model.pt"), "which is no file of a checkpoint"),
    "other pieces": (set_pieces({"w": [[0, 1, 2], [0, 1, 4]]}), "holds other pieces than the manifest lists"),
    "an unknown name": (set_pieces({"w": [[0, 1, 3], [0, 1, 3]], "x": [[0, 1, 1]]}), "holds other pieces"),
    "no list": (set_pieces({"w": "all"}), "manifest.json cannot be read"),
    "no numbers": (set_pieces({"w": [[0, 1, "3"], [0, 1, 3]]}), "manifest.json cannot be read"),
    "too few elements": (set_pieces({"w": [[0, 1, 3]]}), "hold 3 of the 6 elements of w"),
    "another rank": (set_pieces({"w": [[0, 2, 3]]}), "none of the 1 ranks can hold"),
    "ranks without number": (lambda body: body.update(ranks=10**12), "manifest.json cannot be read"),
    "other ranks": (lambda body: body.update(ranks=2), "which is no file of a checkpoint"),
    "the moments of fewer": (lambda body: body.update(first_moment_only=["w"]), "holds other pieces"),
    "a negative size": (lambda body: body["files"][MOMENTS_FILE].update(bytes=-1), "manifest.json cannot be read"),
    "no pieces": (lambda body: body["parameters"].pop("w"), "which is no file of a checkpoint"),
    "moments before an update": (
        lambda body: body["engine"].update(optimizer_steps=0),
        "which is no file of a checkpoint",
    ),
    "no moments": (lambda body: body["files"].pop(MOMENTS_FILE), f"names no {MOMENTS_FILE}"),
    "no counters": (lambda body: body.update(engine=[]), "manifest.json cannot be read"),
    "no state": (lambda body: body.update(state=[]), "manifest.json holds no state"),
    "another layout": (lambda body: body.update(schema=9), "has layout 9"),
    "no weights": (lambda body: body["files"].pop(WEIGHTS_FILE), f"names no {WEIGHTS_FILE}"),
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
    for name in (WEIGHTS_FILE, "manifest.json"):
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
    (folder / "manifest.json").write_bytes(canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()}))
    with pytest.raises(ValueError, match=r"earlier version .*layout 1.*init_from=.*step-00000010"):
        Checkpoints(tmp_path, ALONE).latest()
    for source in (tmp_path, folder):
        weights, meta = load_weights(source)
        assert weights["w"].tolist() == [[4.0] * 3] * 2 and meta == {"step": 10}


def second_layout(folder: Path, updates: int = 1) -> Path:
    """A checkpoint as rank 0 wrote it before every rank saved its own weights; of `w` and of `m`, a matrix of Muon's, and with
    an average of weights, which is passed over."""
    folder.mkdir(parents=True)
    weights = {"w": torch.arange(6.0).view(2, 3), "m": torch.arange(4.0).view(2, 2) + 10}
    save_file(weights, folder / "weights.safetensors", {"format": "pt"})
    save_file({n: w / 2 for n, w in weights.items()}, folder / "average.safetensors", {"format": "pt"})
    moments = [
        {"exp_avg:w:0": torch.full((4,), 0.5), "exp_avg_sq:w:0": torch.full((4,), 0.25)},
        {"exp_avg:w:4": torch.full((2,), 1.5), "exp_avg_sq:w:4": torch.full((2,), 1.25)}
        | {"exp_avg:m:0": torch.full((4,), 3.0)},
    ]
    pieces: list[dict[str, Any]] = [
        {"pieces": {"w": [[0, 4]]}},
        {"pieces": {"w": [[4, 2]], "m": [[0, 4]]}, "first_moment_only": ["m"]},
    ]
    for rank, tensors in enumerate(moments):
        save_file(tensors, folder / f"moments-{rank:05d}-of-00002.safetensors", {"format": "pt"})
    entries = {}
    for number, name in enumerate(sorted(path.name for path in folder.iterdir())):
        data = (folder / name).read_bytes()
        entries[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if name.startswith("moments"):
            entries[name] |= pieces[number - 1]
    body = {"schema": 2, "files": entries, "state": {"step": 10}}
    body |= {"engine": {"optimizer_steps": updates, "averaged": 3}}
    (folder / "manifest.json").write_bytes(canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()}))
    return folder


class Reads:
    """Asks for all that is still read of a checkpoint of `second_layout` and keeps it."""

    def restore(self, read: Any, shapes: Any, counters: Any) -> None:
        assert shapes == {"w": [2, 3], "m": [2, 2]} and counters == {"optimizer_steps": 1}
        self.found: dict[str, list[float]] = {}
        for kind, name in [(k, n) for k in ("weight", "exp_avg") for n in "wm"] + [("exp_avg_sq", "w")]:
            into = torch.zeros(3)
            read(kind, name, 1, into)
            self.found[f"{kind} {name}"] = into.tolist()


def test_a_checkpoint_of_the_second_layout_is_gone_on_from(tmp_path):
    folder, engine = second_layout(tmp_path / "checkpoints" / "step-00000010"), Reads()
    checkpoints = Checkpoints(tmp_path, ALONE)
    assert checkpoints.latest() == folder
    assert checkpoints.load(engine, folder) == {"step": 10}
    assert engine.found == {
        "weight w": [1.0, 2.0, 3.0], "weight m": [11.0, 12.0, 13.0], "exp_avg w": [0.5] * 3, "exp_avg m": [3.0] * 3, "exp_avg_sq w": [0.25] * 3,
    }  # fmt: skip
    weights, state = load_weights(tmp_path)
    assert weights["m"].tolist() == [[10.0, 11.0], [12.0, 13.0]] and state == {"step": 10}


def test_damage_of_the_second_layout_is_seen(tmp_path):
    folder = second_layout(tmp_path / "checkpoints" / "step-00000010")
    for name in ("weights.safetensors", "moments-00001-of-00002.safetensors"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ValueError, match=rf"{name} has another SHA-256"):
            Checkpoints(tmp_path, ALONE).latest()
        (folder / name).write_bytes(whole)
    reseal(folder, lambda body: body["files"]["moments-00001-of-00002.safetensors"]["pieces"].pop("m"))
    with pytest.raises(ValueError, match="holds other pieces than the manifest lists"):
        Checkpoints(tmp_path, ALONE).latest()
    other = second_layout(tmp_path / "other" / "checkpoints" / "step-00000010", updates=0)
    with pytest.raises(ValueError, match=r"its moments hold (\d) of the \1 elements"):
        Checkpoints(other.parents[1], ALONE).latest()

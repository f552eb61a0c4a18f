"""Models by their names on a hub, which runs on this machine; the library and its cache are the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megabert.commands import export
from megabert.hf import model_folder
from tests.helpers import hub, runs

CALLS = """
import sys
from megabert.commands import convert, evaluate, fill
codes = [fill.main(["--model", "some/bert", "the [MASK] fox"]), fill.main(["--model", "some/bret", "the [MASK]"])]
codes += [convert.main(["--model", "some/bert", "--run", sys.argv[1]])]
print(codes)
"""


def call(address: str, folder: Path, out: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", CALLS, str(folder / out)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
def test_a_hub_name_is_downloaded_once(old: bool, tmp_path) -> None:
    run = runs.make(tmp_path / "run", "uncased")
    export.export(run, tmp_path / "hf")
    if old:
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(tmp_path / "hf/model.safetensors"), tmp_path / "hf/pytorch_model.bin")
        (tmp_path / "hf/model.safetensors").unlink()
    with hub.serving("some/bert", tmp_path / "hf") as address:
        done = call(address, tmp_path, "start")
    assert "[0, 2, 0]" in done.stdout and done.stdout.startswith("[MASK]  "), done.stdout + done.stderr
    assert (
        done.stderr
        == "error: some/bret: no such folder, and the hub has no model of that name, or none that is public\n"
    )
    assert (tmp_path / "start/config.toml").is_file()
    away = call(address, tmp_path, "start2")
    assert "[0, 4, 0]" in away.stdout and away.stdout.splitlines()[0] == done.stdout.splitlines()[0]
    assert "some/bret: no such folder, and the hub cannot be reached" in away.stderr


def test_a_wrong_path_never_asks_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "some").mkdir()
    for wrong in ("runs/mni", "nowhere", "/absent/run", "./a/b", "runs/mini/checkpoints", "a b/c"):
        with pytest.raises(ValueError, match=r"no such folder; name a run folder, .* OWNER/NAME"):
            model_folder(wrong)
    with pytest.raises(ValueError, match=r"^runs: no checkpoint in it, .* no model.safetensors or pytorch_model.bin, "):
        model_folder("runs")
    for file in (
        "run/checkpoints/step-00000001/manifest.json",
        "tuned/best/model.safetensors",
        "old/pytorch_model.bin",
    ):
        path = Path(file)
        path.parent.mkdir(parents=True)
        path.touch()
        for folder in (path.parent, path.parents[-2]):
            assert model_folder(folder) == folder

"""The doctor tells the truth about this machine, about packages that only look right, and about what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megabert import config
from megabert.commands import doctor

ROOT = Path(__file__).resolve().parents[2]
TOP = "class FusedAdam: ...\nclass FusedLAMB: ...\n"


def place(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes Python files and puts the folder first on the path of this process and of those it starts."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)


def test_this_machine_is_reported_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megabert.commands.doctor", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {(line["section"], line["name"]): line for line in json.loads(done.stdout)}
    for name in doctor.NEEDED:
        line = lines["packages", name]
        assert (line["state"], line["value"]) == ("ok", importlib.metadata.version(name))
    assert f"{len(os.sched_getaffinity(0))} usable cores" in lines["machine", "cpu"]["value"]
    operations = {name.split()[0]: line["value"] for (section, name), line in lines.items() if section == "operations"}
    assert set(config.OpsConfig.model_fields) <= set(operations)
    built = (ROOT / "megabert" / "_native.abi3.so").is_file()
    assert (lines["operations", "native library"]["state"] == "ok") == built
    for op in config.OpsConfig.model_fields:
        backend, _, reason = operations[op].partition(": ")
        assert backend in ("sdpa", "varlen", "native", "torch") and reason


def test_the_wrong_apex_is_named_as_wrong(tmp_path, monkeypatch) -> None:
    place(tmp_path, {"apex/__init__.py": "def authenticate(): ...\n"}, monkeypatch)
    line = doctor.apex()
    assert line.state == "note" and "not NVIDIA's" in line.value and "pip uninstall apex" in line.fix


def test_nvidias_apex_is_known_by_its_modules(tmp_path, monkeypatch) -> None:
    files = {
        "apex/__init__.py": "",
        "apex/optimizers/__init__.py": TOP,
        "apex/normalization/__init__.py": "class FusedLayerNorm: ...\n",
    }
    place(tmp_path, files, monkeypatch)
    line = doctor.apex()
    assert line.state == "ok" and "NVIDIA's" in line.value and not line.fix


def test_an_apex_that_does_not_import_says_why(tmp_path, monkeypatch) -> None:
    files = {"apex/__init__.py": "", "apex/optimizers/__init__.py": "import amp_C_is_not_built\n"}
    place(tmp_path, files, monkeypatch)
    line = doctor.apex()
    assert line.state == "note" and "amp_C_is_not_built" in line.value


def test_without_torch_training_cannot_run_and_nothing_crashes(monkeypatch, capsys) -> None:
    real = doctor.probe
    refused = (False, "ModuleNotFoundError: No module named 'torch'")
    monkeypatch.setattr(doctor, "probe", lambda code: refused if "import torch" in code else real("print(1)"))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "!! torch" in out and "No module named 'torch'" in out
    assert out.splitlines()[-1].startswith("training cannot run here; missing: torch")


@pytest.mark.parametrize(
    ("code", "works", "message"),
    [
        ("print('first'); print('last')", True, "last"),
        ("import no_such_module", False, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os; os.abort()", False, "killed by signal 6"),
    ],
)
def test_a_probe_survives_what_it_probes(code: str, works: bool, message: str) -> None:
    assert doctor.probe(code) == (works, message)


def test_tools_beside_python_or_on_path_are_found(tmp_path, monkeypatch) -> None:
    script = tmp_path / "sbatch"
    script.write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor.tool("sbatch", "--version") == f"slurm-wlm 22.05.8 ({script})"
    assert doctor.tool("no-such-tool", "--version") is None

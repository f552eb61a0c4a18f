"""The doctor reports this machine, packages that only look right, and about what is missing."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

from megabert import config
from megabert.commands import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_this_machine_is_reported_as_it_is() -> None:
    command = [sys.executable, "-m", "megabert.commands.doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
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


def test_apex_is_imported_as_training_does(tmp_path, monkeypatch) -> None:
    line = doctor.apex()
    assert (line.state, line.value) == ("note", "not used: ModuleNotFoundError: No module named 'amp_C'") and line.fix
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("def authenticate(): ...\n")
    assert "the package apex installed here is another one" in doctor.apex().value
    kernels = "multi_tensor_adam_capturable = multi_tensor_lamb_mp = None\n"
    (tmp_path / "apex/multi_tensor_apply.py").write_text("multi_tensor_applier = None\n")
    (tmp_path / "amp_C.py").write_text(kernels)
    assert doctor.apex() == doctor.Finding("packages", "apex", "ok", "NVIDIA's, no version")


def test_without_torch_training_cannot_run_and_nothing_crashes(monkeypatch, capsys) -> None:
    real = doctor.probe
    refused = (False, "ModuleNotFoundError: No module named 'torch'")
    monkeypatch.setattr(doctor, "probe", lambda code: refused if "import torch" in code else real("print(1)"))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "!! torch" in out and "No module named 'torch'" in out
    assert out.splitlines()[-1].startswith("training cannot run here; missing: torch")


def test_a_probe_survives_what_it_probes() -> None:
    assert doctor.probe("print('first'); print('last')") == (True, "last")
    refused = (False, "ModuleNotFoundError: No module named 'no_such_module'")
    assert doctor.probe("import no_such_module") == refused
    assert doctor.probe("import os; os.abort()") == (False, "killed by signal 6")

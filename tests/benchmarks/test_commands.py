"""Every benchmark starts as a user types it, and its first line is what its help begins with."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

from tests.conftest import ROOT

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def test_every_script_starts_and_says_what_it_measures() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}
    started = [
        subprocess.Popen(
            [sys.executable, f"benchmarks/{script.name}", "--help"],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for script in SCRIPTS
    ]  # fmt: skip
    assert len(started) >= 10
    for script, process in zip(SCRIPTS, started, strict=True):
        output, _ = process.communicate(timeout=300)
        first = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
        assert process.returncode == 0, output
        assert " ".join(first.split()) in " ".join(output.split())
        assert "--json FILE" in output and "--allow-dirty" in output

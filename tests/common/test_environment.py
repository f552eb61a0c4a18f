"""One description of the environment, without importing what it describes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megabert.common import environment

ROOT = Path(__file__).resolve().parents[2]


def test_versions_are_told_without_importing_the_packages() -> None:
    program = (
        "import sys\nfrom megabert.common import environment\nprint(environment.versions()['torch'])\n"
        "environment.cpu_model(), environment.cpu_flags(), environment.gpus(), environment.revision()\n"
        "assert not {'torch', 'numpy', 'deepspeed'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip() == importlib.metadata.version("torch")
    assert environment.version("no-such-package") is None and "no-such-package" not in environment.versions()


def test_the_revision_says_whether_the_tree_differs_from_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.revision() == "unknown" and environment.changes() == []
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "results").mkdir()
    for name in ("code", "results/one"):
        (tmp_path / name).write_text("1")
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *args], cwd=tmp_path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout[:12]
    assert environment.revision() == head
    (tmp_path / "results" / "one").write_text("2")
    assert environment.revision() == f"{head}+changes" and environment.revision(["results"]) == head
    (tmp_path / "code").write_text("2")
    assert environment.revision(["results"]) == f"{head}+changes"
    assert environment.changes(["results"]) == [" M code"]
    monkeypatch.setattr(environment, "ROOT", tmp_path / "results")  # as installed somewhere in a repository of its user
    assert environment.revision() == "unknown"


def test_a_program_that_is_not_there_says_nothing() -> None:
    assert environment.output(["no-such-program"]) == "" and environment.output(["false"]) == ""


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="not Linux")
def test_memory_is_the_machines() -> None:
    assert environment.memory_gib() == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, abs=0.1
    )

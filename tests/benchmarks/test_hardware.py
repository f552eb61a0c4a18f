"""A committed result belongs to a revision: a tree with changes is refused before anything is measured."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common import hardware
from megabert.common import environment


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with one commit, in place of ours."""
    (tmp_path / hardware.RESULTS).mkdir(parents=True)
    (tmp_path / "source.py").write_text("1\n")
    (tmp_path / hardware.RESULTS / "old.json").write_text("{}\n")
    names = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    for command in (["init", "-q"], ["add", "."], [*names, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    for module in (hardware, environment):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    hardware.changes.cache_clear()
    yield tmp_path
    hardware.changes.cache_clear()


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    hardware.add_json(parser)
    args = parser.parse_args(arguments)
    hardware.refuse_dirty(parser, args)
    return args


def test_only_a_clean_tree_writes_results_unless_allowed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tree / hardware.RESULTS / "new.json"
    target.write_text("{}\n")  # results do not make it dirty
    hardware.write_json(parse("--json", str(target)).json, {"ratio": 2.0})
    about = json.loads(target.read_text())["about"]
    assert "+changes" not in about["revision"] and "changes" not in about
    (tree / "source.py").write_text("2\n")
    hardware.changes.cache_clear()
    with pytest.raises(SystemExit, match="2"):
        parse("--json", str(target))
    assert "source.py" in capsys.readouterr().err
    parse("--json", str(tree / "elsewhere.json"))
    hardware.write_json(parse("--json", str(target), "--allow-dirty").json, {})
    about = json.loads(target.read_text())["about"]
    assert about["revision"].endswith("+changes") and about["changes"] == [" M source.py"]

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


def test_a_clean_tree_may_write_its_results(tree: Path) -> None:
    (tree / hardware.RESULTS / "new.json").write_text("{}\n")  # results do not make it dirty
    target = parse("--json", str(tree / hardware.RESULTS / "new.json")).json
    hardware.write_json(target, {"ratio": 2.0})
    about = json.loads(target.read_text())["about"]
    assert "+changes" not in about["revision"] and "changes" not in about


def test_a_changed_tree_may_not_but_where_it_is_allowed_and_said(tree: Path, capsys) -> None:
    (tree / "source.py").write_text("2\n")
    target = tree / hardware.RESULTS / "new.json"
    with pytest.raises(SystemExit) as ended:
        parse("--json", str(target))
    assert ended.value.code == 2 and "source.py" in capsys.readouterr().err
    parse("--json", str(tree / "elsewhere.json"))
    hardware.write_json(parse("--json", str(target), "--allow-dirty").json, {})
    about = json.loads(target.read_text())["about"]
    assert about["revision"].endswith("+changes") and about["changes"] == [" M source.py"]

"""The pages of docs/, README and CONTRIBUTING: names in them exist, links lead somewhere, the site builds without network."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# written by docs/conf.py when the site is built
GENERATED = ROOT / "docs" / "configuration.md"
DOCS = sorted(set((ROOT / "docs").glob("*.md")) - {GENERATED})
PAGES = [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
SOURCE = r"[\w.-]+(?:/[\w.-]+)+\.(?:py|cpp|cu|cuh|h|inl|sh|slurm|toml|md|svg)"
MENTION = re.compile(rf"`({SOURCE})(?:::([\w.]+))?`")
PLACEHOLDERS = re.compile(r"\b(?:OP|NAME|DIR|RUN|MODEL|START)\b|test_OP")


@cache
def names_in(path: Path) -> set[str]:
    """Classes, functions, methods and assigned names of a Python file, those of classes as `Class.name`."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    collect(ast.parse(path.read_text()).body, "")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_and_names_in_the_text_exist(page: Path) -> None:
    missing = []
    for name, inside in MENTION.findall(page.read_text()):
        if PLACEHOLDERS.search(name):
            continue
        path = ROOT / name
        if not path.is_file():
            missing.append(name)
        elif inside and inside not in names_in(path):
            missing.append(f"{name}::{inside}")
    assert not missing, f"{page.name} names what is not there: {missing}"


def test_every_folder_is_in_the_file_tree_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme[readme.index("## What is where") :]
    for package in ("megabert", "data_prep"):
        folders = {path.parent.name for path in (ROOT / package).glob("*/*.py")}
        assert [name for name in sorted(folders) if f"{name}/" not in tree] == []


def test_the_loop_in_the_readme_is_the_example() -> None:
    example = (ROOT / "examples/train_loop.py").read_text()
    assert f"\n```python\n{example}```\n" in (ROOT / "README.md").read_text(), "quote examples/train_loop.py"


@pytest.mark.parametrize("page", ["README.md", "docs/planner.md", "docs/cluster.md"])
def test_plans_in_the_text_are_computed(page: str, capsys) -> None:
    from megabert.commands.plan import main

    commands = re.findall(r"^ *megabert plan (.*)", (ROOT / page).read_text(), re.M)
    assert commands
    for command in commands:
        # rows of 64 tokens
        named = command.replace("DATA/seq128", f"{ROOT}/tests/data/golden/dataset data.seq_len=0")
        words = shlex.split(named, comments=True)
        assert main(words) == 0, command
        assert len(capsys.readouterr().out.splitlines()) > 5


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in DOCS:
        assert page.name == "index.md" or (f"]({page.name})" in index and f"\n{page.stem}\n" in index), page.name
    assert f"\n{GENERATED.stem}\n" in index


def test_the_site_builds_and_asks_nothing_of_the_network(tmp_path) -> None:
    source, site = shutil.copytree(ROOT / "docs", tmp_path / "docs"), tmp_path / "site"
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")

    def build() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", source, site]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    done = build()
    assert done.returncode == 0, done.stderr
    for page in [*DOCS, GENERATED]:
        html = (site / f"{page.stem}.html").read_text()
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//(?!localhost)", html), page.name
    assert ">optimizer.lr<" in (site / "configuration.html").read_text()
    with open(source / "glossary.md", "a") as file:
        file.write("\n[nowhere](nowhere.md)\n")
    assert build().returncode != 0, "a broken link must fail"

"""The race and the search as they are typed, on tracks of seconds; killed and started again, they do what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT, command

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SMALL = """about = "a test's"
preset = "tiny"
vocabulary = 600

[keys]
"model.nsp" = false
"model.hidden" = 32
"batch.global_size" = 16
"batch.micro_size" = 16
"data.workers" = 0
"""
PEER = """about = "a test's peer"
system = "huggingface"
preset = "tiny"
vocabulary = 600

[keys]
batch = 16
causal = 0.5
"model.layers" = 1
"""
SEARCH = """recipe = "{recipe}"

[space]
"optimizer.lr" = {{ low = 1e-4, high = 1e-2, log = true }}

[[rung]]
track = "8k-tokens"
trials = 3

[[rung]]
track = "16k-tokens"
trials = 1
seeds = 2
"""


@pytest.fixture
def text(tmp_path: Path, corpus: Path) -> Path:
    """Python's own documentation as WikiExtractor writes articles: a paragraph a document, so that some are held out."""
    folder = tmp_path / "text/enwiki/AA"
    folder.mkdir(parents=True)
    topics = [json.loads(line)["text"] for line in (corpus / "topics.jsonl").read_text().splitlines()]
    documents = [part for topic in topics for part in topic.split("\n\n") if len(part) > 200]
    articles = [f'<doc id="{n}">\nTitle\n\n{part}\n</doc>\n' for n, part in enumerate(documents)]
    (folder / "wiki_00").write_text("".join(articles))
    return tmp_path / "text"


def test_a_race_of_both_systems_is_scored_once_a_seed_and_drawn(tmp_path: Path, text: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL + '"objective.causal_share" = 0.3\n')
    (tmp_path / "peer.toml").write_text(PEER)
    race = [
        "benchmarks/speedrun.py",
        "--text",
        text,
        "--run",
        tmp_path / "race",
        "--json",
        tmp_path / "r.json",
        "--threads",
        1,
    ]
    both = ["--recipe", tmp_path / "small.toml", tmp_path / "peer.toml"]
    done = command(*race, *both, "--track", "10k-tokens", "--plot", tmp_path / "plot.svg", timeout=900)
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "r.json").read_text())["entries"]
    assert [(entry["recipe"], list(entry["seeds"])) for entry in first] == [("small", ["42"]), ("peer", ["42"])]
    for entry in first:
        found = entry["seeds"]["42"]
        assert 9_000 < found["tokens"] < 12_000 and 1 < found["bits"] < 8
        assert len(found["curve"]) >= 5 and found["curve"][-1]["loss"] < found["curve"][0]["loss"]
    assert "million real tokens" in (tmp_path / "plot.svg").read_text()
    assert not list((tmp_path / "race/runs").glob("*/*/")), "runs are gone when they are scored"

    more = command(*race, *both[:2], "--track", "10k-tokens", "--seeds", 2, timeout=900)
    timed = command(*race, *both[:2], "--track", "0.05min-1cores", timeout=900)
    assert more.returncode == timed.returncode == 0, more.stderr + timed.stderr
    small, peer, minutes = json.loads((tmp_path / "r.json").read_text())["entries"]
    assert list(small["seeds"]) == ["42", "43"] and small["seeds"]["42"] == first[0]["seeds"]["42"]
    assert peer == first[1] and 3.0 <= minutes["seeds"]["42"]["seconds"] < 6.0
    written = (tmp_path / "r.json").read_bytes()
    again = command(*race, *both, "--track", "10k-tokens", timeout=900)
    assert again.stdout == more.stdout and (tmp_path / "r.json").read_bytes() == written


def test_a_search_killed_twice_ends_with_the_same_table(tmp_path: Path, text: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "find.toml").write_text(SEARCH.format(recipe=tmp_path / "small.toml"))
    search = [sys.executable, "benchmarks/recipe_search.py", "--search", tmp_path / "find.toml"]
    search += ["--threads", "1", "--text", text, "--run", tmp_path / "race", "--winner", tmp_path / "best.toml"]

    def rows(name: str) -> list[dict]:
        path = tmp_path / name
        return json.loads(path.read_text())["rows"] if path.is_file() else []

    for wanted in (1, 2):
        process = subprocess.Popen(
            [*map(str, search), "--json", str(tmp_path / "killed.json")], cwd=ROOT, start_new_session=True
        )
        deadline = time.time() + 600
        while len(rows("killed.json")) < wanted and time.time() < deadline:
            time.sleep(0.2)
        time.sleep(1.0)  # into the next trial
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finished = command(*search[1:], "--json", tmp_path / "killed.json", timeout=900)
    whole = command(*search[1:], "--json", tmp_path / "whole.json", timeout=900)
    assert finished.returncode == whole.returncode == 0, finished.stderr + whole.stderr

    def scores(name: str) -> list[tuple]:
        return [(r["trial"], r["track"], r["seed"], r["bits"], r["keys"]) for r in rows(name)]

    assert len(scores("whole.json")) == 5 and scores("killed.json") == scores("whole.json")
    assert finished.stdout == whole.stdout and finished.stdout.count("\n") == 2 + 3
    first = sorted(row["bits"] for row in rows("whole.json")[:3])
    best = next(row for row in rows("whole.json")[:3] if row["bits"] == first[0])
    assert {row["trial"] for row in rows("whole.json")[3:]} == {best["trial"]}
    for key, value in best["keys"].items():
        assert f'"{key}" = {value}' in (tmp_path / "best.toml").read_text()


def test_a_trial_that_diverges_is_a_row_and_one_that_cannot_train_an_error(tmp_path: Path, text: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL + '"optimizer.clip" = 0.0\n"precision" = "fp32"\n')
    (tmp_path / "find.toml").write_text(
        f'recipe = "{tmp_path}/small.toml"\n[space]\n"optimizer.lr" = [1e30]\n[[rung]]\ntrack = "8k-tokens"\ntrials = 2\n'
    )
    search = ["benchmarks/recipe_search.py", "--search", tmp_path / "find.toml", "--text", text, "--threads", 1]
    search += ["--run", tmp_path / "race", "--json", tmp_path / "t.json"]
    done = command(*search, timeout=900)
    assert done.returncode == 0, done.stderr
    sound, diverged = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert not sound["diverged"] and diverged["diverged"] and diverged["bits"] is None
    assert "diverged" in done.stdout
    (tmp_path / "find.toml").write_text((tmp_path / "find.toml").read_text().replace("1e30", "-1.0"))
    refused = command(*search)
    assert refused.returncode == 2 and "was made by a search with another digest" in refused.stderr
    refused = command(*search[:-1], tmp_path / "other.json", "--runs", 2)
    assert refused.returncode == 2 and "optimizer.lr" in refused.stderr.splitlines()[-1]

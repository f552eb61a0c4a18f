"""The race's command on tracks of seconds; started again it trains what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import command

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


def test_a_race_of_both_systems_is_scored_once_a_seed(tmp_path: Path, text: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL + '"objective.causal_share" = 0.3\n')
    (tmp_path / "peer.toml").write_text(PEER)
    race = ["benchmarks/speedrun.py", "--text", text, "--run", tmp_path / "race", "--json", tmp_path / "r.json"]
    race += ["--threads", 1]
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

    described = ["benchmarks/reproduce.py", "10k-tokens/small", "--records", tmp_path / "r.json"]
    described += ["--run", tmp_path / "again"]
    done = command(*described, "--text", text, timeout=900)
    assert done.returncode == 0 and "inside the 50% band" in done.stdout, done.stdout + done.stderr
    assert "note: the shards" not in done.stdout
    done = command(*described, "--text", text, "--share", 0.2, timeout=900)
    assert done.returncode == 0 and done.stdout.endswith("a trial: not compared\n"), done.stderr
    done = command(*described, "--text", tmp_path, timeout=900)
    assert done.returncode == 2 and "held-out documents are not those of the record" in done.stderr

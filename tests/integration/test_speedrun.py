"""The race's command on tracks of seconds; started again it trains what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import command

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HEAD = """about = "a test's"
preset = "tiny"
vocabulary = 600
"""
SMALL = f"""{HEAD}
[keys]
"model.nsp" = false
"model.hidden" = 32
"batch.global_size" = 16
"batch.micro_size" = 16
"data.workers" = 0
"objective.causal_share" = 0.3
"""
PEER = f"""{HEAD}system = "huggingface"

[keys]
batch = 16
"model.layers" = 1
"""


def output_of(*words: object, code: int = 0) -> str:
    """What a script prints: to stdout, or to stderr where it ends with a `code` that is not 0."""
    done = command(*words, timeout=900)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


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


def test_race_is_scored_once_a_seed(tmp_path: Path, text: Path) -> None:
    records = tmp_path / "r.json"
    for name, recipe in (("small", SMALL), ("peer", PEER)):
        (tmp_path / f"{name}.toml").write_text(recipe)
    race = ["benchmarks/speedrun.py", "--text", text, "--run", tmp_path / "race", "--json", records, "--threads", 1]
    small, both = (
        [*race, "--recipe", *(tmp_path / f"{n}.toml" for n in names)] for names in (("small",), ("small", "peer"))
    )
    output_of(*both, "--track", "10k-tokens", "--plot", tmp_path / "plot.svg")
    first = json.loads(records.read_text())["entries"]
    assert [(entry["recipe"], list(entry["seeds"])) for entry in first] == [("small", ["42"]), ("peer", ["42"])]
    for entry in first:
        found = entry["seeds"]["42"]
        assert 9_000 < found["tokens"] < 12_000 and 1 < found["bits"] < 8
        assert len(found["curve"]) >= 5 and found["curve"][-1]["loss"] < found["curve"][0]["loss"]
    assert "million real tokens" in (tmp_path / "plot.svg").read_text()
    assert not list((tmp_path / "race/runs").glob("*/*/")), "runs are gone when they are scored"

    more = output_of(*small, "--track", "10k-tokens", "--seeds", 2)
    output_of(*small, "--track", "0.05min-1cores")
    ours, peer, minutes = json.loads(records.read_text())["entries"]
    assert list(ours["seeds"]) == ["42", "43"] and ours["seeds"]["42"] == first[0]["seeds"]["42"]
    assert peer == first[1] and 3.0 <= minutes["seeds"]["42"]["seconds"] < 6.0
    written = records.read_bytes()
    assert output_of(*both, "--track", "10k-tokens") == more and records.read_bytes() == written

    again = ("benchmarks/reproduce.py", "10k-tokens/small", "--records", records, "--run", tmp_path / "again", "--text")
    shown = output_of(*again, text, "--seed", 42)  # one of the record's
    assert "inside the 50% band" in shown and "note: the shards" not in shown
    trial = output_of(*again, text, "--share", 0.2)
    assert "-tokens, seed 44: " in trial and trial.endswith("a trial: not compared\n")
    assert "held-out documents are not those of the record" in output_of(*again, tmp_path, code=2)

"""A build that would train a poor model stops before it writes rows, says why, and goes on when told to."""

from __future__ import annotations

import json

import pytest

from data_prep.__main__ import main
from data_prep.common.errors import Unfinished
from data_prep.executor.work_files import ItemResult
from data_prep.stages import sequences

GOOD = {
    "pairs": 2000,
    "random next": 1000,
    "tokens": 99_000,
    "corpus tokens": 90_000,
    "borrowed tokens": 10_000,
    "truncated tokens": 9000,
}
GOOD |= {"sentences": 4000, "documents": 400}


def drawn(**changes: int) -> ItemResult:
    done = ItemResult()
    done.counts.update(GOOD | {name.replace("_", " "): value for name, value in changes.items()})
    return done


def test_only_what_passes_a_limit_stops(capsys: pytest.CaptureFixture[str]) -> None:
    sequences.check(drawn(random_next=1200, truncated_tokens=20_000), 128, allow=False)
    with pytest.raises(Unfinished, match=r"rows of 128: 60% of the pairs .*10\.0 sentences .*--no-nsp.*--allow"):
        sequences.check(drawn(random_next=1201), 128, allow=False)
    with pytest.raises(
        Unfinished, match=r"20% of the tokens are cut off, .* 22 tokens .*--seq-len 512.*--max-sentence 16"
    ):
        sequences.check(drawn(truncated_tokens=20_001), 128, allow=False)
    assert not capsys.readouterr().err
    sequences.check(drawn(random_next=1201), 128, allow=True)
    sequences.check(drawn(pairs=900, random_next=800), 128, allow=False)  # too few to judge
    sequences.check(drawn(random_next=1201), 127, allow=False)  # rows too short to judge
    sequences.check(drawn(pairs=0, random_next=0, truncated_tokens=90_000), 128, allow=True)  # no pairs at all
    assert capsys.readouterr().err.count("of the pairs have a random second part") == 3


def test_a_corpus_of_single_sentences(tmp_path, capsys) -> None:
    records = ({"text": f"Record number {i} says one thing and stops after {i % 97} words."} for i in range(1300))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["build", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--workers", "1"]
    command += ["--vocab-size", "120", "--quiet"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: rows of 128: 100% of the pairs have a random second part") and said.count("\n") == 1
    assert not list((tmp_path / "out").glob("*.tar")) and not (tmp_path / "out" / "manifest.json").exists()
    assert main([*command, "--allow"]) == 0
    out = capsys.readouterr().out
    assert "random next 100.0%, cut off 0 tokens (0.0%)" in out and "resumed" in out

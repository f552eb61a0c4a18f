"""A run learns, ends where one that was never stopped ends, and leaves a folder that its readers agree about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megabert import hf as pretrained
from megabert.commands import features
from megabert.common.errors import BadTraining
from megabert.distributed.process_group import World
from megabert.distributed.watchdog import Watchdog
from megabert.finetune.embed import batches, model, pairs, training
from megabert.finetune.embed.pairs import Columns, Pairs
from megabert.finetune.embed.training import Data, EmbeddingRun, Settings
from tests.helpers import finetune_problem
from tests.helpers import pairs as problem
from tests.helpers.loop import StopAt
from tests.helpers.ranks import run_ranks

SETTINGS = Settings(lr=3e-3, batch=16, epochs=2, max_length=16, precision="fp32", zero=0, micro_batch=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    finetune_problem.write_run(folder / "run")
    problem.write(folder / "train.tsv", 70, 1)
    problem.write(folder / "dev.tsv", 40, 2)
    return folder


def run(base: Path, folder: Path, world: World, settings: Settings, stop: Any = None) -> Any:
    columns = Columns(("a", "b"), ("wrong",))
    learned, judged = (pairs.read(base / f"{name}.tsv", columns) for name in ("train", "dev"))
    assert isinstance(learned, Pairs)
    start = pretrained.load(base / "run")
    own = EmbeddingRun(folder, "name", Data(learned, {"dev": judged}), start, settings, world, 2)
    return own.train(stop or StopAt(), Watchdog(world, "", 0))


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory, world) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(base, folder, world, replace(SETTINGS, evaluations=2))


def test_a_run_learns_and_is_searched_as_it_was_judged(trained, base, world) -> None:
    folder, result = trained
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    judged = [line["dev/ndcg@10"] for line in lines if "dev/ndcg@10" in line]
    assert len(judged) == 4 and judged[-1] > judged[0] + 0.1
    assert result["scores"]["dev"]["ndcg@10"] == pytest.approx(max(judged), abs=1e-6)
    assert json.loads((folder / "result.json").read_text()) == result and not (folder / "checkpoints").exists()
    module, found, pooling = training.load(folder, world, torch.float32)
    given = pairs.read(base / "dev.tsv", Columns(("a", "b"), ("wrong",)))
    scores = training.judge(module, given, found.tokenizer, pooling.max_length, world)
    assert scores == pytest.approx(result["scores"]["dev"], abs=1e-6)


def test_a_run_that_was_stopped_ends_with_the_same_weights(trained, base, tmp_path, world) -> None:
    settings = replace(SETTINGS, evaluations=2)
    for ask in (3, 4):  # inside a window, after an evaluation
        assert run(base, tmp_path, world, settings, StopAt(ask)) is None
    parts = run(base, tmp_path, world, settings)
    folder, whole = trained
    assert {**parts, "seconds": 0} == {**whole, "seconds": 0}
    one, other = (load_file(path / "best/model.safetensors") for path in (folder, tmp_path))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_features_gives_the_vectors_that_are_searched_by(trained, base, tmp_path, world) -> None:
    best = trained[0] / "best"
    texts = ["w1 w2 w3", "w4 " * 30, "w5"]
    (tmp_path / "lines.txt").write_text("".join(f"{text}\n" for text in texts))
    arguments = ["--pool", "sentence", "--input", str(tmp_path / "lines.txt")]
    assert features.main(["--model", str(best), "--output", str(tmp_path / "v.npy"), *arguments]) == 0
    module, found, pooling = training.load(best, world, torch.float32)
    assert pooling.max_length == SETTINGS.max_length
    items = batches.encode(texts, found.tokenizer, pooling.max_length)
    wanted = model.vectors_of(module, items, pooling.max_length, world).numpy()
    written = np.load(tmp_path / "v.npy")
    assert np.allclose(written, wanted, atol=1e-6)


def test_features_refuses_a_model_that_does_not_say_how(base, tmp_path, capsys) -> None:
    (tmp_path / "lines.txt").write_text("w1\n")
    arguments = ["--pool", "sentence", "--input", str(tmp_path / "lines.txt"), "--output", str(tmp_path / "v.npy")]
    assert features.main(["--model", str(base / "run"), *arguments]) == 2
    error = capsys.readouterr().err
    assert "has no modules.json" in error and error.count("\n") == 1 and not (tmp_path / "v.npy").exists()


def test_scored_pairs_are_judged_by_their_cosines(trained, tmp_path, world) -> None:
    """STS-B's way: here the pairs that belong together are scored higher."""
    texts = ["w1 w2", "w7 w8 w9", "w30"]
    rows = [(a, problem.partner(b), 1.0 + (a == b)) for a in texts for b in texts]
    (tmp_path / "sts.tsv").write_text("a\tb\tscore\n" + "".join(f"{a}\t{b}\t{s}\n" for a, b, s in rows))
    given = pairs.read(tmp_path / "sts.tsv", Columns(("a", "b"), score="score"))
    module, found, pooling = training.load(trained[0], world, torch.float32)
    scores = training.judge(module, given, found.tokenizer, pooling.max_length, world)
    assert scores is not None and list(scores) == ["spearman", "pearson"] and scores["spearman"] > 0.5
    items = batches.encode([text for a, b, _ in rows for text in (a, b)], found.tokenizer, pooling.max_length)
    vectors = model.vectors_of(module, items, pooling.max_length, world).numpy()
    cosines = (vectors[::2] * vectors[1::2]).sum(1)
    assert scores["pearson"] == pytest.approx(np.corrcoef(cosines, [s for *_, s in rows])[0, 1], abs=1e-5)


def test_weights_that_are_not_finite_end_the_run(base, tmp_path, world) -> None:
    with pytest.raises(BadTraining, match="lower --lr"):
        run(base, tmp_path, world, replace(SETTINGS, lr=1e30, epochs=1, warmup=0.0, weight_decay=1e30))


def _run_on_ranks(world: World, base: str, folder: str) -> Any:
    return run(Path(base), Path(folder), world, replace(SETTINGS, dropout=0.0, zero=1))


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_make_the_model_of_one(base, tmp_path, world) -> None:
    one = run(base, tmp_path / "one", world, replace(SETTINGS, dropout=0.0))
    results = run_ranks(2, _run_on_ranks, str(base), str(tmp_path / "two"))
    assert results[0] == results[1] and results[0]["best_step"] == one["best_step"] == 10
    a, b = (load_file(tmp_path / name / "best/model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(a[name], b[name], atol=2e-4) for name in a)

"""Models trained in one's own loop go back to files; misuse of the Python face is one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import megabert
from tests.helpers import fast_tokenizers, runs

GOLDEN = Path(__file__).parent / "data/golden/dataset"
TEXT = "the quick [MASK] fox"


@pytest.fixture
def trained(tmp_path: Path) -> megabert.LoadedModel:
    """A model whose weights were changed in memory."""
    model = megabert.load(runs.make(tmp_path / "run"))
    before = model.encode(TEXT)
    optimizer = torch.optim.SGD(model.model.parameters(), lr=0.5)
    model.model(model.tokenizer(TEXT)).logsumexp(-1).sum().backward()
    optimizer.step()
    assert not np.allclose(model.encode(TEXT), before, atol=1e-3), "vectors are of the weights as they are now"
    return model


def test_a_trained_model_is_exported_as_it_is(trained: megabert.LoadedModel, tmp_path: Path) -> None:
    want = trained.logits(TEXT)
    trained.export(tmp_path / "hf")
    peer = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        torch.testing.assert_close(peer(trained.tokenizer(TEXT).long()).logits, want, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="is not empty"):
        trained.export(tmp_path / "hf")
    trained.export(tmp_path / "hf", overwrite=True)


def test_a_trained_model_is_saved_as_a_run(trained: megabert.LoadedModel, tmp_path: Path) -> None:
    trained.save(tmp_path / "next")
    again = megabert.load(tmp_path / "next")
    assert again.logits(TEXT).equal(trained.logits(TEXT)) and again.fill(TEXT) == trained.fill(TEXT)
    assert again.pretrained.step == 0 and again.pretrained.state["dataset"].startswith("none, saved from Python")
    with pytest.raises(ValueError, match="is not empty"):
        trained.save(tmp_path / "next")


def test_filling_leaves_the_mode_and_takes_lists(trained: megabert.LoadedModel) -> None:
    trained.model.train()
    one, two = trained.fill([TEXT, "she [MASK] sea [MASK]"], top=2)
    assert trained.model.training and one == trained.fill(TEXT, top=2) and [len(words) for words in two] == [2, 2]


def test_the_tokenizers_own_mask_is_filled(tmp_path: Path) -> None:
    model = megabert.load(runs.make(tmp_path / "run", str(fast_tokenizers.write(tmp_path / "tokenizer.json"))))
    assert model.fill("the <mask> fox") == model.fill("the [MASK] fox")
    with pytest.raises(ValueError, match=r"the text has no \[MASK\] or <mask>"):
        model.fill("the fox")


def test_rows_are_taken_by_slices_and_from_the_end() -> None:
    dataset = megabert.Dataset(GOLDEN)
    np.testing.assert_array_equal(dataset[-1]["ids"], dataset[dataset.rows - 1]["ids"])
    taken = dataset[2:8:3]
    assert [row["ids"].tolist() for row in taken] == [dataset[i]["ids"].tolist() for i in (2, 5)]
    with pytest.raises(IndexError):
        dataset[-dataset.rows - 1]


def test_objects_describe_themselves(tmp_path: Path) -> None:
    assert dir(megabert) == sorted(["__version__", *megabert.__all__])
    dataset = megabert.Dataset(GOLDEN)
    assert repr(dataset).endswith(f": {dataset.rows:,} rows of 64, {dataset.manifest.vocab_size:,} tokens)")
    model = megabert.load(runs.make(tmp_path))
    size = model.pretrained.config.model
    assert f"step 0: bert, {size.layers} layers of {size.hidden}" in repr(model)


def test_misuse_is_named(tmp_path: Path) -> None:
    model = megabert.load(runs.make(tmp_path))
    with pytest.raises(ValueError, match="pool='none': choose mean, max, cls"):
        model.encode("text", pool="none")
    with pytest.raises(TypeError, match=r"texts\[1\]: expected str, got int"):
        model.encode(["text", 5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"dataset: expected megabert\.Dataset, got 'data'"):
        next(megabert.batches("data"))  # type: ignore[arg-type]


OWN_LOOP = """
import sys, megabert
run, data, *overrides = sys.argv[1:]
for end in (4, None):
    with megabert.training(run, "tiny", *overrides, data=data, stop_after=end) as trainer:
        for update in trainer:
            print(update.step, update.objective, float(update.result.host_loss))
        print("finished", trainer.finished)
"""


@pytest.mark.dist
def test_a_run_is_trained_update_by_update(tmp_path: Path) -> None:
    """In one process, stopped and opened again: the losses of `megabert train` on the same data."""
    overrides = ["batch.global_size=16", "batch.micro_size=16", "schedule.total_steps=7", "schedule.warmup_steps=2"]
    overrides += ["log.interval=1", "eval.rows=16", "data.workers=0", "peak_tflops=1.0", "log.tensorboard=false"]

    def python(*command: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command), *overrides], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    own = python("-c", OWN_LOOP, tmp_path / "own", GOLDEN)
    found = re.findall(r"^(\d+) masked (\d+\.\d+)$", own, re.M)
    assert [int(step) for step, _ in found] == [1, 2, 3, 4, 5, 6, 7], own
    assert re.findall(r"^finished (True|False)$", own, re.M) == ["True", "True"]
    python("-m", "megabert", "train", "--config", "tiny", "--data", GOLDEN, "--run", tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    want = [line["train/loss"] for line in lines if "train/loss" in line]
    assert [float(loss) for _, loss in found] == pytest.approx(want, rel=1e-5)
    mine = [json.loads(line) for line in (tmp_path / "own/metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in mine if "train/loss" in line] == want, "and it writes the same files"

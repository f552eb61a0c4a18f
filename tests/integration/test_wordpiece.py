"""Masking, training and evaluation on WordPiece rows, whose special ids are not 0 to 4."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from megabert.commands.evaluate import evaluate_run
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.helpers import wordpiece
from tests.helpers.rows import make_dataset
from tests.integration.conftest import command, metrics

ROWS, LENGTH = 48, 32


def rows(tokenizer: Tokenizer, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`[CLS] A [SEP] B [SEP]` of words drawn at random, one sequence a row."""
    rng = np.random.default_rng(seed)
    ids, bounds = np.zeros((ROWS, LENGTH), np.uint16), np.zeros((ROWS, 2, 2), np.uint16)
    isnext = np.full((ROWS, 2), -1, np.int8)
    known = [word for word in wordpiece.WORDS if not word.startswith("##")]
    for i in range(ROWS):
        a, b = tokenizer.encode_batch([" ".join(rng.choice(known, 6)), " ".join(rng.choice(known, 4))])
        row = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id][:LENGTH]
        row[-1] = tokenizer.sep_id
        ids[i, : len(row)] = row
        bounds[i, 0], isnext[i, 0] = (len(row), len(a) + 2), rng.integers(2)
    return ids, bounds, isnext


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "seq32"
    (folder / "held_out").mkdir(parents=True)
    tokenizer = Tokenizer.load(wordpiece.write(folder / "vocab.txt"))
    entry = {"kind": tokenizer.kind, "file": "vocab.txt", "sha256": tokenizer.sha256}
    entry |= {"vocab_size": tokenizer.vocab_size, "special_ids": tokenizer.special_ids}
    options = {"seq_len": LENGTH, "slots": 2}
    inner = make_dataset(
        folder / "held_out", ROWS, arrays=rows(tokenizer, 1), tokenizer=entry | {"file": "../vocab.txt"}, **options
    )  # fmt: skip
    sha256 = hashlib.sha256((inner / "manifest.json").read_bytes()).hexdigest()
    held_out = {"path": "held_out", "rows": ROWS, "manifest_sha256": sha256}
    return make_dataset(folder, ROWS, arrays=rows(tokenizer, 0), tokenizer=entry, held_out=held_out, **options)


def test_special_ids_are_neither_masked_nor_drawn(folder):
    dataset = Dataset(folder)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    loader = Loader(dataset, tokenizer, global_batch=ROWS, micro_batch=ROWS, seed=3)
    special = torch.tensor(sorted(tokenizer.special_ids.values()))
    shown_as = {"mask": 0, "random": 0, "kept": 0}
    for _ in range(20):
        (batch,) = next(loader).batches
        original = torch.from_numpy(dataset.read(batch.row_ids).ids.astype(np.int32))
        used = batch.mlm_labels >= 0
        at, labels = batch.mlm_positions[used].long(), batch.mlm_labels[used]
        shown = batch.input_ids.ravel()[at]
        assert (original.ravel()[at] == labels).all() and not torch.isin(labels, special).any()
        masked = shown == tokenizer.mask_id
        assert not torch.isin(shown[~masked], special).any()
        assert ((batch.input_ids != original).sum(1) <= used.sum(1)).all()
        shown_as["mask"] += int(masked.sum())
        shown_as["random"] += int((~masked & (shown != labels)).sum())
        shown_as["kept"] += int((shown == labels).sum())
    total = sum(shown_as.values())
    assert 0.75 < shown_as["mask"] / total < 0.85 and min(shown_as.values()) > 0.05 * total, shown_as


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["token", "word", "span"])
def test_train_and_evaluate(folder, tmp_path, strategy):
    done = command(
        *("megabert/train.py", "--config", "tiny", "--data", folder, "--run", tmp_path / "run"),
        *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=16", "batch.micro_size=16"),
        *("schedule.total_steps=2", "schedule.warmup_steps=1", "log.interval=1", "peak_tflops=1.0"),
        *("data.workers=0", f"data.masking.strategy={strategy}"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [m["train/loss"] for m in metrics(tmp_path / "run") if "train/loss" in m]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    figures = evaluate_run(str(tmp_path / "run"), str(folder))
    assert figures["step"] == 2 and figures["eval/predictions"] > ROWS

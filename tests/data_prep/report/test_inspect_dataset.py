"""Verification names what is damaged; inspection shows rows as the trainer sees them."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.report import inspect_dataset
from data_prep.report.inspect_dataset import inspect
from megabert.data import shards
from megabert.data.masking import MaskingConfig, MaskingVocabulary, mask
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.helpers import wordpiece
from tests.helpers.golden_runs import held_out_of
from tests.helpers.rows import make_dataset


@pytest.fixture
def shards_folder(tmp_path) -> Path:
    """Three shards of 64, 64 and 20 rows and a held-out dataset of one."""
    inner = make_dataset(tmp_path / "data" / "held_out", 8, seed=3)
    shards_folder = make_dataset(tmp_path / "data", 148, held_out=held_out_of(inner, 8))
    assert list(inspect_dataset.verify(shards_folder)) == []
    return shards_folder


def test_processes_change_nothing_but_the_time(shards_folder):
    for name, at in (("shard-000000.tar", 5000), ("shard-000002.tar", 9000), ("held_out/shard-000000.tar", 700)):
        data = (shards_folder / name).read_bytes()
        (shards_folder / name).write_bytes(data[:at] + b"\xff\xfe\xfd" + data[at + 3 :])
    (shards_folder / "shard-000001.tar").unlink()
    (shards_folder / "shard-000009.tar").write_bytes(b"")
    one = list(inspect_dataset.verify(shards_folder))
    assert list(inspect_dataset.verify(shards_folder, workers=3)) == one
    assert f"{shards_folder / 'shard-000009.tar'}: is not in the manifest" in one and len(one) >= 8
    assert f"{shards_folder / 'shard-000001.tar'}: is missing" in one


def test_a_folder_of_datasets_is_verified_whole(shards_folder, tmp_path):
    top = tmp_path / "top"
    shutil.copytree(shards_folder, top / "seq512")
    make_dataset(top / "seq128", 20)
    (top / "notes").mkdir()
    assert inspect_dataset.datasets(top) == [top / "seq128", top / "seq512"]
    assert list(inspect_dataset.verify(top, workers=2)) == []
    os.truncate(top / "seq512" / "shard-000001.tar", 9000)
    (line,) = inspect_dataset.verify(top)
    assert line.startswith(f"{top / 'seq512' / 'shard-000001.tar'}: block 1 is cut at byte 9000 of ")
    (top / "seq128" / "manifest.json").write_text("{")
    first, _ = inspect_dataset.verify(top)
    assert first.startswith(f"{top / 'seq128' / 'manifest.json'}: not valid JSON")
    (top / "seq128" / "manifest.json").unlink()
    for folder in (top, top / "seq128"):
        errors = [*inspect_dataset.verify(folder)]
        assert any(line.startswith(f"{top / 'seq128' / 'manifest.json'}: not found") for line in errors)


A, B = "the cafe over the river", "words words sea fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 rows of 40: a pair, a single sequence (in odd rows with [UNK] words), padding."""
    folder = tmp_path_factory.mktemp("top") / "seq40"
    folder.mkdir()
    tokenizer = Tokenizer.load(wordpiece.write(folder / "vocab.txt"))
    ids, bounds = np.zeros((24, 40), np.uint16), np.zeros((24, 3, 2), np.uint16)
    isnext = np.full((24, 3), -1, np.int8)
    a, b = tokenizer.encode_batch([A, B])
    for i in range(24):
        c = tokenizer.encode_batch([f"sea {i} " + "ﷺ " * (i % 2)])[0]
        pair = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        row = [*pair, tokenizer.cls_id, *c, tokenizer.sep_id]
        ids[i, : len(row)] = row
        bounds[i, :2], isnext[i, 0] = [(len(pair), len(a) + 2), (len(c) + 2, len(c) + 2)], i % 2
    entry = {"kind": "wordpiece", "file": "vocab.txt", "sha256": tokenizer.sha256}
    entry |= {"vocab_size": tokenizer.vocab_size, "special_ids": tokenizer.special_ids}
    made = {"arrays": (ids, bounds, isnext), "tokenizer": entry, "statistics": {"documents": 1234567}}
    return make_dataset(folder, 24, seq_len=40, slots=3, **made)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def sample(text):
    """Row number -> its part of the text."""
    return {int(number): part for number, part in re.findall(r"\nrow (\d+)\n(.*?)(?=\n\n|\Z)", text, re.S)}


def test_counts_and_decoded_rows(folder, monkeypatch):
    text = inspect(folder, rows=24)
    assert "24 of 40 tokens, up to 3 sequences each" in text and "(wordpiece)" in text
    assert re.search(r"documents +1,234,567\n", text) and "2.000 sequences a row, over 24 rows" in text
    parts = sample(text)
    assert sorted(parts) == list(range(24))
    for i, part in parts.items():
        lines = part.splitlines()
        assert f"  sequence 0: 12 tokens, {'random next' if i % 2 else 'next'}" in lines
        assert f"    A: [CLS] {A} [SEP]" in lines and f"    B: {B} [SEP]" in lines
        assert any(line.startswith("  sequence 1: ") and line.endswith(" tokens, no pair") for line in lines)
        assert f"    A: [CLS] sea {i}{' [UNK]' * (i % 2)} [SEP]" in lines
    monkeypatch.setenv("COLUMNS", "60")
    assert all(len(line) <= 60 for part in sample(inspect(folder, rows=5)).values() for line in part.splitlines())
    assert inspect_dataset._printable("a\x1b[2Jb\u202e") == "a\ufffd[2Jb\ufffd"


@pytest.mark.parametrize("strategy", ["token", "word"])
def test_masked_rows_are_the_trainers(folder, strategy):
    dataset = Dataset(folder)
    t = Tokenizer.load(dataset.tokenizer_path)
    vocabulary = MaskingVocabulary.of(t)
    seen = np.zeros(3, int)  # masks, random tokens, kept tokens
    for i, part in sample(inspect(folder, 24, strategy)).items():
        rows, at, masking = dataset.read(np.array([i])), np.array([i]), MaskingConfig(strategy=strategy)
        masked = mask(rows.ids, rows.bounds, at, seed=0, epoch=0, vocabulary=vocabulary, masking=masking)
        shown = " ".join(re.findall(r"    masked: (.*)", part))
        used = masked.positions[0, : masked.counts[0]]
        new, labels = masked.ids[0, used], masked.labels[0, : len(used)]
        hidden, kept = new == t.mask_id, new == labels
        assert shown.count("[MASK]") == hidden.sum()
        for text, which in (("*{}*", ~hidden & ~kept), ("={}=", kept)):
            for token in new[which].tolist():
                assert text.format(t.tokens[token].strip()) in shown
        seen += [hidden.sum(), (~hidden & ~kept).sum(), kept.sum()]
    assert seen.min() > 3


def test_another_tokenizer_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "data")
    wordpiece.write(tmp_path / "data" / "vocab.txt", cased=True)
    with pytest.raises(ValueError, match=r"vocab\.txt: not the tokenizer that"):
        inspect(tmp_path / "data")


def die(check):
    os.kill(os.getpid(), 9)


def test_a_killed_worker_of_verify_is_one_line(shards_folder, monkeypatch, capfd):
    monkeypatch.setattr(shards.ShardCheck, "problems", die)
    assert main(["verify", str(shards_folder), "--workers", "2", "--quiet"]) == 4
    printed = capfd.readouterr().err
    assert printed.startswith("error: a worker process died") and printed.count("\n") == 1

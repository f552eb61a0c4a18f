"""What inspect shows is what the files hold and what the trainer's own masking does to them."""

from __future__ import annotations

import os
import re
import shutil
import types

import numpy as np
import pytest

from data_prep.report import inspect_dataset
from data_prep.report.inspect_dataset import histogram, inspect
from megabert.data.masking import Masking, MaskingVocabulary, mask
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.helpers import wordpiece
from tests.helpers.rows import make_dataset

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
    statistics = {"documents": 1234567}
    return make_dataset(
        folder, 24, seq_len=40, slots=3, arrays=(ids, bounds, isnext), tokenizer=entry, statistics=statistics
    )


@pytest.fixture
def screen(monkeypatch):
    """Sets the terminal's width and whether stdout is one."""

    def set_to(columns, terminal=False, no_color=None):
        monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
        monkeypatch.setattr(
            inspect_dataset, "sys", types.SimpleNamespace(stdout=types.SimpleNamespace(isatty=lambda: terminal))
        )
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color is not None:
            monkeypatch.setenv("NO_COLOR", no_color)

    return set_to


def sample(text):
    """Row number -> its part of the text."""
    return {int(number): part for number, part in re.findall(r"\nrow (\d+)\n(.*?)(?=\n\n|\Z)", text, re.S)}


def test_counts_and_decoded_rows(folder, screen):
    screen(200)
    text = inspect(folder, rows=24, seed=1)
    assert "24 of 40 tokens, up to 3 sequences each" in text and "(wordpiece)" in text
    assert re.search(r"documents +1,234,567\n", text) and "2.000 sequences a row, over 24 rows" in text
    parts = sample(text)
    assert sorted(parts) == list(range(24))
    for i, part in parts.items():
        lines = part.splitlines()
        assert f"  sequence 0: 12 tokens, {'random next' if i % 2 else 'next'}" in lines
        assert f"    A: [CLS] {A} [SEP]" in lines and f"    B: {B} [SEP]" in lines
        assert f"  sequence 1: {lines[0].count('1')} tokens, no pair" in lines
        assert f"    A: [CLS] sea {i}{' [UNK]' * (i % 2)} [SEP]" in lines


def test_the_bar_shows_sequences_their_parts_and_padding(folder, screen):
    screen(100)
    assert sample(inspect(folder, rows=24))[3].splitlines()[0] == "  0000000=====11111" + "." * 23
    assert inspect_dataset._bar([(60, 20), (40, 40)], 128, 32) == "00000==========1111111111......."


def test_masked_rows_are_the_trainers(folder, screen):
    screen(200)
    dataset = Dataset(folder)
    t = Tokenizer.load(dataset.tokenizer_path)
    vocabulary = MaskingVocabulary(t.vocab_size, t.mask_id, t.special_ids.values(), t.unit_start)
    seen = {"mask": 0, "random": 0, "kept": 0}
    for strategy in ("token", "word", "span"):
        for i, part in sample(inspect(folder, 24, 5, strategy)).items():
            rows, at = dataset.read(np.array([i])), np.array([i])
            masked = mask(rows.ids, rows.bounds, at, seed=5, epoch=0, vocabulary=vocabulary, masking=Masking(strategy))
            shown = " ".join(re.findall(r"    masked: (.*)", part))
            used = masked.positions[0, : masked.counts[0]]
            new, labels = masked.ids[0, used], masked.labels[0, : len(used)]
            hidden, kept = new == t.mask_id, new == labels
            assert shown.count("[MASK]") == hidden.sum()
            for text, which in (("*{}*", ~hidden & ~kept), ("={}=", kept)):
                for token in new[which].tolist():
                    assert text.format(t.tokens[token].strip()) in shown
            for name, which in (("mask", hidden), ("random", ~hidden & ~kept), ("kept", kept)):
                seen[name] += int(which.sum())
    assert min(seen.values()) > 5
    assert inspect(folder, 3, 5, "word") == inspect(folder, 3, 5, "word") != inspect(folder, 3, 6, "word")


def test_every_line_fits_and_colour_needs_a_terminal(folder, screen):
    for columns in (60, 90, 160):
        screen(columns)
        plain = inspect(folder, rows=5)
        breakable = plain.replace(Dataset(folder).manifest.fingerprint, "").replace(str(folder), "")
        assert all(len(line) <= columns for line in breakable.splitlines())
        for terminal, no_color in ((True, None), (True, ""), (True, "1"), (False, None)):
            screen(columns, terminal, no_color)
            text = inspect(folder, rows=5)
            assert ("\x1b[" in text) is (terminal and not no_color)
            assert re.sub(r"\x1b\[\d+m", "", text) == plain


def test_a_folder_of_datasets_shows_each(folder, tmp_path):
    text = inspect(folder.parent, rows=1)
    assert len(sample(text)) == 1
    shutil.copytree(folder, tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    text = inspect(tmp_path, rows=0)
    assert [line.split("/")[-1] for line in text.splitlines() if line.startswith("dataset")] == ["a", "b"]
    assert not sample(text) and "predicted:" not in text


def test_text_cannot_steer_the_terminal():
    assert inspect_dataset._printable("a\x1b[2Jb\u202e") == "a\ufffd[2Jb\ufffd"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((-1, 0, "token"), "--rows"),
        ((1, -1, "token"), "--seed"),
        ((1, 0, "words"), "--masking: must be token, word or span"),
    ],
)
def test_wrong_arguments_are_named(folder, arguments, said):
    with pytest.raises(ValueError, match=said):
        inspect(folder, *arguments)


def test_another_tokenizer_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "data")
    wordpiece.write(tmp_path / "data" / "vocab.txt", cased=True)
    with pytest.raises(ValueError, match=r"vocab\.txt: not the tokenizer that"):
        inspect(tmp_path / "data")


def test_the_histogram_counts_everything_once():
    values = np.random.default_rng(0).integers(1, 129, 5000)
    lines = histogram(values, 128, bar=30)
    assert len(lines) == 16 and sum(int(line.split()[1].replace(",", "")) for line in lines) == 5000
    assert max(line.count("█") for line in lines) == 30
    assert lines[0].split()[0] == "1-8" and lines[-1].split()[0] == "121-128"
    assert [line.split()[:2] for line in histogram(np.array([1, 3, 3]), 3, bar=4)] == [["1-1", "1"], ["2-2", "0"], ["3-3", "2"]]  # fmt: skip

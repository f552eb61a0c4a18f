"""A word that is added is one piece, starts from the mean of what it was, and moves nothing that was there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert import hf as pretrained
from megabert.commands import convert, export
from megabert.data.tokenizer import Tokenizer
from megabert.hf import extend
from tests.helpers import runs

WORDS = {"uncased": ["foxes", "seafox", "Oversea", "the"], "unigram": ["shellsea", "riverbank", "the"]}
ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["the quick brown fox", "sea shells by the river, over words"]


@pytest.mark.parametrize(("kind", "tied"), [("uncased", True), ("unigram", False)])
def test_words_are_added_to_tokenizer_and_model(kind: str, tied: bool, tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", kind, tied=tied)
    export.export(run, tmp_path / "hf")
    before = pretrained.load(run)
    (tmp_path / "words.txt").write_text("\n".join([*WORDS[kind], WORDS[kind][0], ""]))
    arguments = [
        "--model",
        str(tmp_path / "hf"),
        "--run",
        str(tmp_path / "more"),
        "--add-words",
        str(tmp_path / "words.txt"),
    ]
    assert convert.main(arguments) == 0
    after = pretrained.load(tmp_path / "more")
    old, new, size = before.tokenizer, after.tokenizer, before.tokenizer.vocab_size
    added = [word for word in WORDS[kind] if word != "the"]
    assert new.vocab_size == size + len(added) == after.config.model.vocab_size and new.sha256 != old.sha256
    assert new.encode_batch(added) == [[size + i] for i in range(len(added))]
    assert new.encode_batch(TEXTS) == old.encode_batch(TEXTS) and new.special_ids == old.special_ids
    rows = {"embeddings.word.weight", "embeddings.word.bias"} | (set() if tied else {"embeddings.word.decoder"})
    for name in rows:
        was, now = before.weights[name], after.weights[name]
        assert now[:size].equal(was[:size])
        for i, ids in enumerate(old.encode_batch(added)):
            assert len(ids) > 1 and torch.allclose(now[size + i], was[ids].mean(0))
    assert all(after.weights[name].equal(before.weights[name]) for name in before.weights.keys() - rows)


def test_a_word_of_a_script_without_spaces_is_found_inside_of_a_text(tmp_path: Path) -> None:
    from data_prep.options import BuildOptions
    from data_prep.stages.train_tokenizer import train

    lines = ["他在清晨的市场里买菜。", "图书馆在城市的中心。", "老王卖豆腐和蔬菜。"] * 9
    (tmp_path / "m").write_bytes(train(lines, BuildOptions(vocab_size=30, character_coverage=1.0)))
    tokenizer = Tokenizer.load(tmp_path / "m")
    more, parts = extend.extended(tokenizer, ["城市的中心"])
    assert [tokenizer.tokens[i] for i in parts[0]] and len(parts[0]) > 1
    assert tokenizer.vocab_size in more.encode_batch(["图书馆在城市的中心。"])[0]


BPE_WORDS = ["seafoxes", "riverbanks", "foxriver", "photosynthesis", "日本語学", "the"]


@pytest.mark.parametrize("changes", [{}, {"byte_fallback": True, "vocab_size": 400}])
def test_a_bpe_model_takes_words_and_keeps_the_ids_of_all_other_text(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(runs.sentencepiece_model(model_type="bpe", **changes))
    old = Tokenizer.load(tmp_path / "m")
    new, parts = extend.extended(old, BPE_WORDS)
    size, added = old.vocab_size, BPE_WORDS[:-1]
    assert new.vocab_size == size + len(parts) and new.tokens[:size] == old.tokens
    ids = [ids[0] for ids in new.encode_batch(added[:4])] + new.encode_inside(added[4:])[0]
    assert len(set(ids)) == 5 and min(ids) >= size and new.decode(new.encode_batch(["a foxriver"])[0]) == "a foxriver"
    assert ids[4] in new.encode_batch(["は日本語学です"])[0]
    for i, was in zip(ids, [*old.encode_batch(added[:4]), *old.encode_inside(added[4:])], strict=True):
        assert parts[i - size] == was
    rows = {"bert.embeddings.word_embeddings.weight": torch.randn(size, 4)}
    now = extend.rows_of(rows, parts)["bert.embeddings.word_embeddings.weight"]
    assert torch.allclose(now[ids[0]], now[:size][old.encode_batch(added[:1])[0]].mean(0))
    texts = [
        line for path in (ROOT / "README.md", ROOT / "data_prep" / "README.md") for line in path.read_text().split("\n")
    ]
    texts += [*TEXTS, "photosynthetic photosynthesi seafox foxriv riverbank", "日本語 学"]
    assert new.encode_batch(texts) == old.encode_batch(texts)
    again, more = extend.extended(new, ["photosynthesi", "seafoxes"])
    assert again.vocab_size == new.vocab_size + len(more)
    assert len(again.encode_batch(["photosynthesi"])[0]) == 1 and again.encode_batch(added) == new.encode_batch(added)


def test_what_is_on_the_way_to_new_bpe_words_changes_no_other_text(tmp_path: Path) -> None:
    old = runs.tokenizer(tmp_path, "bpe")
    rng = random.Random(2)
    known = sorted({w.lower() for text in runs.TEXT for w in text.split() if w.isascii() and w.isalpha()})
    words = sorted({rng.choice(known) + rng.choice(known) for _ in range(60)})
    new, parts = extend.extended(old, words)
    assert len(parts) > 2 * len(words)
    texts = []
    for _ in range(2000):
        a, b, c = (rng.choice(known) for _ in range(3))
        texts += [a[rng.randrange(len(a)) :] + b[: rng.randint(1, len(b))] + c, a + b[: rng.randint(1, len(b))]]
    texts = [text for text in texts if not text.startswith(tuple(words))]
    assert len(texts) > 3500 and new.encode_batch(texts) == old.encode_batch(texts)


def test_a_model_goes_on_with_a_larger_bpe_vocabulary(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", "bpe")
    export.export(run, tmp_path / "hf")
    before = pretrained.load(run)
    (tmp_path / "words.txt").write_text("foxes\nriverbanks\n")
    arguments = ["--model", tmp_path / "hf", "--run", tmp_path / "more", "--add-words", tmp_path / "words.txt"]
    assert convert.main([str(argument) for argument in arguments]) == 0
    after = pretrained.load(tmp_path / "more")
    assert after.tokenizer.encode_batch(TEXTS) == before.tokenizer.encode_batch(TEXTS)
    was, now = (model.weights["embeddings.word.weight"] for model in (before, after))
    for ids, (new,) in zip(*(m.tokenizer.encode_batch(["foxes", "riverbanks"]) for m in (before, after)), strict=True):
        assert new >= before.tokenizer.vocab_size and torch.allclose(now[new], was[ids].mean(0))
    assert now[: before.tokenizer.vocab_size].equal(was[: before.tokenizer.vocab_size])


def test_words_that_can_be_no_piece_are_named(tmp_path: Path) -> None:
    cased = runs.tokenizer(tmp_path, "cased")
    with pytest.raises(ValueError, match="'covid-19' is 3 words to BERT's tokenizer"):
        extend.extended(cased, ["covid-19"])
    unigram = runs.tokenizer(tmp_path, "unigram")
    with pytest.raises(ValueError, match="'two words' is no single word"):
        extend.extended(unigram, ["two words"])
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty.txt: is empty; give a word a line"):
        extend.read_words(tmp_path / "empty.txt")

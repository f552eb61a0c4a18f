"""Transplanted vocabularies: which old vectors a new token has, by every kind of tokenizer, and the model of them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megabert import hf
from megabert.commands import convert
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.hf.read import Pretrained
from megabert.hf.tokenizer_export import pad_encoded
from megabert.hf.vocabulary import find_sources, similar_tokens
from megabert.model import unpacked_inputs
from tests.helpers import fast_tokenizers, rows, runs, tokenizers
from tests.helpers.refusal import refusal

CPU = torch.device("cpu")
TABLES = ("embeddings.word.weight", "embeddings.word.decoder", "embeddings.word.bias")
KINDS = (*runs.KINDS, *tokenizers.FAST)
RUSSIAN = ["Съешь же ещё этих мягких французских булок, да выпей чаю.", "Широкая электрификация южных губерний"]


def id_of(found: Tokenizer, text: str) -> int:
    """Of the token that stands for `text`, a space before words."""
    return found.tokens.index(text)


def vectors(model: Pretrained, i: int) -> list[Tensor]:
    return [model.weights[name][i] for name in TABLES]


def transplanted(tmp_path: Path, kind: str = "uncased", **fields: object) -> tuple[Pretrained, Pretrained]:
    """A run with a vocabulary of `kind`, and what becomes of it with a byte-level one."""
    old = runs.make(tmp_path / "old", kind, fields={"nsp": False, **fields})
    new = fast_tokenizers.write(tmp_path / "tokenizer.json")
    assert convert.main(["--model", str(old), "--vocab", str(new), "--run", str(tmp_path / "new")]) == 0
    return hf.load(old), hf.load(tmp_path / "new")


def test_shared_tokens_keep_others_get_means(tmp_path, capsys):
    old, new = transplanted(tmp_path, tied=False)
    assert "of 372 tokens " in capsys.readouterr().out
    assert new.config.model.vocab_size == 372 and new.tokenizer.kind == "tokenizers"
    for text in (" sea", " river", " over", "es", "x"):
        theirs, ours = vectors(old, id_of(old.tokenizer, text)), vectors(new, id_of(new.tokenizer, text))
        assert all(a.equal(b) for a, b in zip(theirs, ours, strict=True)), text
    parts = [vectors(old, id_of(old.tokenizer, text)) for text in (" s", "h", "e", "l", "l", "s")]
    for found, *wanted in zip(vectors(new, id_of(new.tokenizer, " shells")), *parts, strict=True):
        torch.testing.assert_close(found, torch.stack(wanted).mean(0))
    ells = find_sources(old.tokenizer, new.tokenizer)[id_of(new.tokenizer, "ells")]
    assert ells == [id_of(old.tokenizer, letter) for letter in "ells"], "tokens inside a word"
    assert list(old.tokenizer.special_ids) == list(new.tokenizer.special_ids)
    for role, i in old.tokenizer.special_ids.items():
        j = new.tokenizer.special_ids[role]
        assert i != j
        assert all(a.equal(b) for a, b in zip(vectors(old, i), vectors(new, j), strict=True))
    assert all(not new.weights[name][372:].any() and len(new.weights[name]) == 384 for name in TABLES)
    others = [name for name in old.weights if name not in TABLES]
    assert others and all(old.weights[name].equal(new.weights[name]) for name in others)


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
def test_sources_spell_the_token_with_its_space(old, new, tmp_path):
    """Between tokens with the space before them and those with a mark inside words."""
    theirs, ours = tokenizers.make(tmp_path / "old", old), tokenizers.make(tmp_path / "new", new)
    lower = str.lower if old == "uncased" else str
    compared = 0
    for text, ids in zip(ours.tokens, find_sources(theirs, ours), strict=True):
        spelled = "".join(theirs.tokens[i] for i in ids)
        if not text.strip().isalpha() or not text.isascii() or len(spelled.strip()) < len(text.strip()):
            continue
        # the first letter of a word inside one may have no token without a space
        assert spelled.strip() == lower(text.strip())
        compared += spelled == lower(text)
        assert text.startswith(" ") <= spelled.startswith(" ")
    assert compared > 40


def test_sources_of_punctuation_and_parts_of_characters(tmp_path):
    """A mark of WordPiece stands for one with a space before it and one without; parts have the mean of their bytes."""
    theirs, ours = tokenizers.make(tmp_path / "old", "json-bytes"), tokenizers.make(tmp_path / "new", "uncased")
    found = find_sources(theirs, ours)
    assert found[id_of(ours, " (")] == [id_of(theirs, " ("), id_of(theirs, "(")]
    assert found[id_of(ours, " ;")] == [id_of(theirs, ";")]
    assert find_sources(ours, theirs)[id_of(theirs, "(")] == [id_of(ours, " (")]
    old, new = (
        Tokenizer.load(fast_tokenizers.write(tmp_path / f"{len(texts)}.json", texts=texts, size=300))
        for texts in (runs.TEXT, RUSSIAN * 20)
    )
    single = {token: i for i, token in enumerate(old.token_bytes()) if len(token) == 1}
    parts = dict(zip(new.token_bytes(), find_sources(old, new), strict=True))
    assert parts["е".encode()] == [single[b"\xd0"], single[b"\xb5"]]
    assert parts[b" \xd1"] == [single[b" "], single[b"\xd1"]]


def test_new_tokens_are_means_of_similar_shared_ones(tmp_path, capsys):
    """Two topics of ten shared tokens, each with one that only the new vocabulary has."""
    old = hf.load(runs.make(tmp_path / "old", "uncased", tied=False))
    path = fast_tokenizers.write(tmp_path / "tokenizer.json")
    new = Tokenizer.load(path)
    sources, known = find_sources(old.tokenizer, new), set(old.tokenizer.token_bytes())
    shared = [i for i, token in enumerate(new.token_bytes()) if token in known and i not in new.special_ids.values()]
    only, never = id_of(new, " shells"), id_of(new, " sells")
    draw = np.random.default_rng(0)
    topics = [np.array([only, *shared[:10]]), np.array([id_of(new, " quick"), *shared[10:20]])]
    ids = np.concatenate([draw.choice(topic, (64, 32)) for topic in topics]).astype(np.uint16)
    ids[:, 0], ids[:, -1] = new.special_ids["cls"], new.special_ids["sep"]
    bounds = np.full((128, 1, 2), 32, np.uint16)
    entry = {"kind": new.kind, "file": path.name, "sha256": new.sha256}
    entry |= {"vocab_size": new.vocab_size, "special_ids": dict(new.special_ids)}
    arrays = ids, bounds, np.full((128, 1), -1, np.int8)
    data = rows.make_dataset(tmp_path / "data", 128, slots=1, arrays=arrays, tokenizer=entry)
    shutil.copy(path, data)
    found = similar_tokens(old.tokenizer, new, Dataset(data))
    assert found.tokens.tolist() == sorted([only, id_of(new, " quick")])
    torch.manual_seed(1)
    again, state = similar_tokens(old.tokenizer, new, Dataset(data)), torch.get_rng_state()
    torch.manual_seed(1)
    assert all(a.equal(b) for a, b in zip(found, again, strict=True)) and state.equal(torch.get_rng_state())
    place = found.tokens.tolist().index(only)
    assert set(found.nearest[place].tolist()) == set(shared[:10])
    torch.testing.assert_close(found.shares.sum(1), torch.ones(2))
    assert (found.shares[:, 0] > found.shares[:, -1]).all()
    assert convert.main(["--model", str(tmp_path / "old"), "--vocab", str(data), "--run", str(tmp_path / "new")]) == 0
    assert "of 372 tokens 2 have the mean of similar ones in" in capsys.readouterr().out
    model = hf.load(tmp_path / "new")
    theirs = [vectors(old, sources[i][0]) for i in found.nearest[place].tolist()]
    for made, *parts in zip(vectors(model, only), *theirs, strict=True):
        expected = sum(share * part for share, part in zip(found.shares[place], parts, strict=True))
        torch.testing.assert_close(made, expected)
    mean = torch.stack([vectors(old, i)[0] for i in sources[never]]).mean(0)
    torch.testing.assert_close(vectors(model, never)[0], mean)
    assert vectors(model, shared[0])[0].equal(vectors(old, sources[shared[0]][0])[0])


def test_unknown_scripts_are_drawn_around_the_mean(tmp_path):
    old = runs.make(tmp_path / "old", "uncased")
    new = fast_tokenizers.write(tmp_path / "tokenizer.json", "unigram", texts=RUSSIAN * 20, size=60)
    model, before = convert.convert(old, tmp_path / "new", vocab=new), hf.load(old).weights
    shown = [i for i, token in enumerate(model.tokenizer.tokens) if token.strip() in ("а", "е", "и", "о")]
    drawn = model.weights[TABLES[0]][shown]
    assert len(shown) > 2 and len({row.sum().item() for row in drawn}) == len(shown)
    assert 0.05 < drawn.std() < 0.2  # that of the old vectors is 0.1
    mean = before["embeddings.word.bias"][: hf.load(old).config.model.vocab_size].mean()
    torch.testing.assert_close(model.weights["embeddings.word.bias"][shown], mean.expand(len(shown)))


def test_roberta_positions_follow_the_new_padding(tmp_path):
    shape = {"segments": 1, "first_position": 2, "hub_type": "roberta"}
    old, new = transplanted(tmp_path, **shape)
    assert new.tokenizer.pad_id == 1 and new.config.model.first_position == 2
    again = convert.convert(tmp_path / "new", tmp_path / "again", vocab=tmp_path / "old")
    assert again.config.model.first_position == 1
    text = "the sea over the river"
    inputs = [unpacked_inputs(pad_encoded(model.tokenizer, text)) for model in (old, again)]
    hidden = [model.model(CPU).encode(**given).detach() for model, given in zip((old, again), inputs, strict=True)]
    torch.testing.assert_close(*hidden)


def test_an_unfit_vocabulary_is_refused_by_name(tmp_path, capsys):
    old, new = runs.make(tmp_path / "old", "uncased"), tmp_path / "new"
    for name in ("empty", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    for vocab, message in (("empty", "empty: holds no tokenizer"), ("data", "manifest.json")):
        command = ("--model", old, "--vocab", tmp_path / vocab, "--run", new)
        assert message in refusal(capsys, convert.main, *command) and not new.exists()

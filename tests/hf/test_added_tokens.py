"""Tokens added to a vocabulary in each layout of a Hugging Face folder: the ids of AutoTokenizer, after convert and export too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from data_prep.tokens.encoder import WordEncoder
from megabert import hf
from megabert.commands import convert, export
from megabert.data.tokenizer import Tokenizer
from megabert.hf.read import read_tokenizer
from megabert.hf.tokenizer_export import pad_encoded
from tests.commands.test_convert import make
from tests.helpers import fast_tokenizers, runs, wordpiece
from tests.helpers.prep_texts import ids_of_build
from tests.helpers.refusal import refusal

TEXTS = ["the covid [E1] sea", "Covid xcovid's covids", "[E1] the fox, covid [unused1]", "covid covid"]
COVID = {"content": "covid", "normalized": True} | dict.fromkeys(("lstrip", "rstrip", "single_word", "special"), False)
MARKER = COVID | {"content": "[E1]", "normalized": False, "special": True}
LAYOUTS = ("tokenizer.json", "beside an older vocab.txt", "added_tokens.json", "added_tokens_decoder", "merges")


def write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree))


def add(folder: Path, layout: str) -> int:
    """Add "covid" and "[E1]" to the vocabulary in `folder`; the number of its tokens then."""
    if layout == "merges":
        (folder / "vocab.txt").unlink()
        tree = json.loads(fast_tokenizers.write(folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").unlink()
        tree["model"]["vocab"]["model"] = len(tree["model"]["vocab"])  # a word of RoBERTa's
        write_json(folder / "vocab.json", tree["model"]["vocab"])
        (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in tree["model"]["merges"]))
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"})
        tokens = len(tree["model"]["vocab"])
    else:
        tokens = len((folder / "vocab.txt").read_text().splitlines())
    if layout in ("added_tokens.json", "merges"):
        write_json(folder / "added_tokens.json", {"covid": tokens, "[E1]": tokens + 1})
        write_json(folder / "special_tokens_map.json", {"extra_special_tokens": ["[E1]"]})
    elif layout == "added_tokens_decoder":
        added = {str(tokens): COVID, str(tokens + 1): MARKER}
        write_json(folder / "tokenizer_config.json", {"do_lower_case": True, "added_tokens_decoder": added})
    else:
        peer = transformers.AutoTokenizer.from_pretrained(folder)
        peer.add_tokens(["covid"])
        peer.add_tokens(["[E1]"], special_tokens=True)
        peer.save_pretrained(folder)
        if layout == "tokenizer.json":
            (folder / "vocab.txt").unlink()
    return tokens + 2


def folder_with(tmp_path: Path, layout: str, rows: int = 0) -> tuple[Path, Any]:
    """A model of random weights with the tokens in `layout`, of `rows` embeddings (0: as many as tokens); its AutoTokenizer."""
    kind, folder = "RobertaForMaskedLM" if layout == "merges" else "BertForPreTraining", tmp_path / "hf"
    tmp_path.mkdir(exist_ok=True)
    make(folder, kind)
    tokens = add(folder, layout)
    texts = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".txt", ".json")}
    more = {"max_position_embeddings": 42, "pad_token_id": 1, "type_vocab_size": 1} if layout == "merges" else {}
    make(folder, kind, vocab_size=rows or tokens, **more)
    (folder / "vocab.txt").unlink()
    for name, data in texts.items():
        if name != "config.json":
            (folder / name).write_bytes(data)
    return folder, transformers.AutoTokenizer.from_pretrained(folder)


def ids(peer: Any, texts: list[str] = TEXTS) -> list[list[int]]:
    return peer(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_added_tokens_survive_convert_and_export(layout: str, tmp_path: Path, capsys) -> None:
    folder, peer = folder_with(tmp_path, layout)
    want, covid = ids(peer), peer.convert_tokens_to_ids("covid")
    assert covid == len(peer) - 2 and all(covid in found for found in want) and covid + 1 in want[0]
    assert read_tokenizer(folder).encode_batch(TEXTS) == want
    for name in ("tokenizer.json", "vocab.txt", "vocab.json"):
        if (folder / name).is_file():
            assert Tokenizer.load(folder / name).encode_batch(TEXTS) == want
    assert convert.main(["--model", str(folder), "--run", str(tmp_path / "run")]) == 0
    assert "which have no tokens" not in capsys.readouterr().out
    run, original = hf.load(tmp_path / "run"), hf.load(folder)
    assert run.tokenizer.encode_batch(TEXTS) == want and run.tokenizer.vocab_size == len(peer)
    assert run.weights["embeddings.word.weight"].equal(original.weights["embeddings.word.weight"])
    assert ids_of_build(TEXTS, run.tokenizer) == want
    export.export(tmp_path / "run", tmp_path / "back")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert ids(again) == want and len(again) == len(peer)
    assert json.loads((tmp_path / "back/config.json").read_text())["vocab_size"] == len(peer)


def test_added_tokens_of_a_new_vocabulary_are_kept(tmp_path: Path) -> None:
    folder, peer = folder_with(tmp_path, "added_tokens.json")
    old = runs.make(tmp_path / "old", "uncased")
    assert convert.main(["--model", str(old), "--vocab", str(folder), "--run", str(tmp_path / "new")]) == 0
    before, after = hf.load(old), hf.load(tmp_path / "new")
    assert after.tokenizer.encode_batch(TEXTS) == ids(peer)
    old, new = (model.weights["embeddings.word.weight"] for model in (before, after))
    parts = before.tokenizer.encode_batch(["covid"])[0]
    torch.testing.assert_close(new[peer.convert_tokens_to_ids("covid")], old[parts].mean(0))


def test_special_tokens_of_a_config_are_found(tmp_path: Path) -> None:
    """Without an id: the next free one; in the vocabulary: its own, also inside a word."""
    wordpiece.write(tmp_path / "vocab.txt")
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    write_json(tmp_path / "tokenizer_config.json", {"extra_special_tokens": ["[E1]", "[unused1]", "sea"]})
    want = ids(transformers.AutoTokenizer.from_pretrained(tmp_path), [*TEXTS, "seas"])
    assert read_tokenizer(tmp_path).encode_batch([*TEXTS, "seas"]) == want


@pytest.mark.parametrize("layout", ["vocab.txt", "tokenizer.json"])
def test_a_vocabulary_has_the_special_tokens_named_beside(layout: str, tmp_path: Path) -> None:
    """Also where BERT's own are among its tokens."""
    path = wordpiece.write(tmp_path / "vocab.txt")
    path.write_text(path.read_text(encoding="utf-8").replace("[unused1]", "</s>"), encoding="utf-8")
    write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": True, "sep_token": "</s>"})
    if layout == "tokenizer.json":
        transformers.BertTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        path.unlink(missing_ok=True)
    peer, found = transformers.BertTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    assert found.sep_id == peer.sep_token_id == 1
    assert pad_encoded(found, "the fox")[0].tolist() == peer("the fox")["input_ids"]


@pytest.mark.parametrize("named", [True, False], ids=["class", "model_type"])
def test_the_casing_beside_a_tokenizer_json_wins(named: bool, tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, "tokenizer.json")
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"do_lower_case": False}
    config = config if named else {"do_lower_case": False}
    write_json(folder / "tokenizer_config.json", config)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    assert ids(peer) == read_tokenizer(folder).encode_batch(TEXTS) and peer.unk_token_id in ids(peer)[1]


@pytest.mark.parametrize("space", [True, False])
def test_the_prefix_space_beside_a_tokenizer_json_wins(space: bool, tmp_path: Path) -> None:
    fast_tokenizers.write(tmp_path / "tokenizer.json", "bytes" if space else "bytes-prefix")
    for named in ({"tokenizer_class": "RobertaTokenizer"}, {}):  # the model's type implies it
        write_json(tmp_path / "tokenizer_config.json", named | {"add_prefix_space": space})
        write_json(tmp_path / "config.json", {"model_type": "roberta"})
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert read_tokenizer(tmp_path).encode_batch(TEXTS) == ids(peer)
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_tokenizer(tmp_path).encode_batch(TEXTS) != ids(peer)


def test_added_tokens_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    tokens = runs.tokenizer(tmp_path / "words", "uncased").vocab_size
    runs.tokenizer(tmp_path / "sp", "unigram")
    for folder, added, message in (
        ("words", {"covid": tokens + 3}, r"vocab\.txt: the ids of its added tokens 'covid' \(\d+\) are not those"),
        ("sp", {"covid": 200}, r"tokenizer\.model: the files beside it add 'covid' to its tokens"),
        ("sp", {"covid": None}, "sp: its files name added tokens not as transformers does"),
    ):
        write_json(tmp_path / folder / "added_tokens.json", added)
        with pytest.raises(ValueError, match=message):
            read_tokenizer(tmp_path / folder)
    write_json(tmp_path / "words/added_tokens.json", {"new york": tokens})
    with pytest.raises(ValueError, match="tokens cross word boundaries or hold whitespace: added tokens 'new york'"):
        WordEncoder(read_tokenizer(tmp_path / "words"), np.dtype(np.uint16))
    # alone it keeps to itself, before another it takes the space that belongs to that one
    path = fast_tokenizers.write(tmp_path / "tokenizer.json", "unigram")
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_tokens([tokenizers.AddedToken("covid", rstrip=True)])
    made.save(str(path))
    assert read_tokenizer(tmp_path).crossing == ["covid"]


def test_tokens_added_to_an_exported_run_are_read(tmp_path: Path) -> None:
    export.export(runs.make(tmp_path / "run", "unigram"), tmp_path / "hf")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    peer.add_tokens(["covid"])
    peer.save_pretrained(tmp_path / "hf")
    found = read_tokenizer(tmp_path / "hf")
    assert (tmp_path / "hf/tokenizer.model").is_file() and found.word_local
    assert found.encode_batch(TEXTS) == ids(peer) and found.vocab_size == len(peer)


def test_missing_embeddings_are_named_and_many_surplus_dropped(tmp_path: Path, capsys) -> None:
    few, _ = folder_with(tmp_path / "few", "added_tokens.json", rows=130)
    said = refusal(capsys, convert.main, "--model", few, "--run", tmp_path / "run")
    assert "vocab_size=130; it has no embeddings of '[E1]'" in said
    folder, peer = folder_with(tmp_path / "many", "added_tokens.json", rows=400)
    run, command = tmp_path / "run", ["--model", str(folder), "--run", str(tmp_path / "run")]
    said = refusal(capsys, convert.main, *command)
    assert f"vocab_size=400; megabert convert --drop-embeddings leaves the last {400 - len(peer)} out" in said
    assert convert.main([*command, "--drop-embeddings"]) == 0
    assert f"the embeddings of ids {len(peer)} to 399, which have no tokens" in capsys.readouterr().out
    assert hf.load(run).config.model.vocab_size == len(peer) == hf.load(run).tokenizer.vocab_size
    again = ("--model", run, "--vocab", folder, "--run", tmp_path / "new", "--drop-embeddings")
    assert "--drop-embeddings: " in refusal(capsys, convert.main, *again)

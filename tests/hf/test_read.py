"""A Hugging Face folder loads as a run does, with transformers' own numbers; nothing of it is run, nothing is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import megabert
from megabert import hf as pretrained
from megabert.commands import convert, export, fill
from megabert.commands.evaluate import evaluate_run
from megabert.data.tokenizer import Tokenizer
from megabert.hf import model_folder, read
from megabert.hf.packing import pack
from megabert.model import unpacked_inputs
from tests.commands.test_convert import edit, make, rewrite
from tests.helpers import fast_tokenizers, runs
from tests.helpers.golden_runs import held_out_of
from tests.helpers.hub import PUBLIC
from tests.helpers.prep_reading import contents
from tests.helpers.refusal import refusal
from tests.helpers.rows import SPECIAL, make_dataset, make_rows
from tests.integration.conftest import command

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 7, "eos_token_id": 8, "cls_token_id": 7, "sep_token_id": 8}
DISTIL: dict[str, Any] = {"n_layers": 2, "dim": 32, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 40}
RELATIVES = ("DistilBertForMaskedLM", "ElectraForMaskedLM")
ENDINGS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "MegatronBertForPreTraining"])
@torch.no_grad()
def test_hidden_states_are_transformers_own(kind: str, binary: bool, tmp_path: Path) -> None:
    peer = make(tmp_path / "hf", kind, binary)
    before = files_of(tmp_path)
    found = pretrained.load(tmp_path / "hf")
    ids = torch.randint(5, found.config.model.vocab_size, (2, 30), generator=torch.Generator().manual_seed(0))
    segments = (torch.arange(30) > 12).long().expand(2, -1)
    states = found.model(CPU).hidden_states(**unpacked_inputs(ids, segments))
    want = getattr(peer, "bert", peer)(ids, token_type_ids=segments, output_hidden_states=True)
    assert len(states) == len(want.hidden_states) == 3
    for got, state in zip(states, want.hidden_states, strict=True):
        assert (got - state).abs().max() <= 1e-5
    assert found.initialised == (("masked-LM head", "next-sentence head") if kind == "BertModel" else ())
    assert found.config.model.nsp == ("pooler.weight" in found.weights) == (kind != "BertForMaskedLM")
    assert found.step == 0 and found.tokenizer.path == tmp_path / "hf" / "vocab.txt"
    assert files_of(tmp_path) == before


def test_weights_compiled_or_in_parts_are_the_same(tmp_path: Path, capsys) -> None:
    peer = make(tmp_path / "hf")
    whole = pretrained.load(tmp_path / "hf").weights
    rewrite(tmp_path / "hf", lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()})
    capsys.readouterr()
    found = pretrained.load(tmp_path / "hf")
    assert found.ignored == found.initialised == () and all(found.weights[n].equal(w) for n, w in whole.items())
    assert "model.safetensors: names contain _orig_mod. (torch.compile); they are" in capsys.readouterr().err
    (tmp_path / "hf" / "model.safetensors").unlink()
    peer.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    parts = pretrained.load(tmp_path / "hf").weights
    assert parts.keys() == whole.keys() and all(parts[name].equal(whole[name]) for name in whole)


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_json_is_enough(lowercase: bool, tmp_path: Path) -> None:
    make(tmp_path / "hf")
    vocabulary = tmp_path / "hf" / "vocab.txt"
    tokens = {token: i for i, token in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    vocabulary.unlink()
    transformers.BertTokenizer(vocab=tokens, do_lower_case=lowercase).save_pretrained(tmp_path / "hf")
    found = pretrained.load(tmp_path / "hf")
    peer = transformers.BertTokenizer.from_pretrained(tmp_path / "hf")
    text = "The quick caf\u00e9"
    assert found.tokenizer.path.name == "tokenizer.json" and found.tokenizer.casing.lowercase is lowercase
    assert found.tokenizer.encode_batch([text]) == [peer(text, add_special_tokens=False)["input_ids"]]
    convert.convert(tmp_path / "hf", tmp_path / "run")
    assert list(tokens) == (tmp_path / "run" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert pretrained.load(tmp_path / "run").tokenizer.casing.lowercase is lowercase
    data, file = tmp_path / "data", tmp_path / "hf" / "tokenizer.json"
    ids, *bounds = make_rows(8, 32, 3)
    about = {"kind": "tokenizers", "file": file.name, "sha256": Tokenizer.load(file).sha256, "vocab_size": len(tokens)}
    for folder in (data / "held_out", data):  # built with the file as it is
        split = {"held_out": held_out_of(data / "held_out", 8)} if folder == data else {}
        rows = (ids % len(tokens), *bounds)
        make_dataset(folder, 8, arrays=rows, tokenizer=about | {"special_ids": SPECIAL}, **split)
    assert evaluate_run(tmp_path / "hf", str(data))["eval/predictions"] > 20


def test_tokenizer_json_wins_over_a_sentencepiece_model(tmp_path: Path) -> None:
    """Whose ids are others in XLM-RoBERTa's and CamemBERT's folders."""
    fast_tokenizers.write(tmp_path / "tokenizer.json", kind="unigram")
    (tmp_path / "sentencepiece.bpe.model").write_bytes(runs.sentencepiece_model())
    assert read.read_tokenizer(tmp_path).path.name == "tokenizer.json"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_vocabulary_of_another_tokenizer_is_refused(file: str, tmp_path: Path, caplog) -> None:
    make(tmp_path / "hf")
    path = tmp_path / "hf" / file
    config = json.loads(path.read_text()) if path.is_file() else {"do_lower_case": False}
    path.write_text(json.dumps(config | {"tokenizer_class": "BertTokenizerFast"}))
    assert read.read(tmp_path / "hf").tokenizer.kind == "wordpiece"
    assert ("says whether it is cased" in caplog.text) == (file == "config.json")
    for field, value in {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"}.items():
        path.write_text(json.dumps(config | {field: value}))
        with pytest.raises(ValueError, match=f"{file}: {field} is '{value}'"):
            read.read(tmp_path / "hf")


def test_a_tokenizer_json_that_splits_otherwise_is_refused(tmp_path: Path) -> None:
    tokens = {token: i for i, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"))}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": tokens}
    tree = {"model": model | {"max_input_chars_per_word": 100}, "normalizer": {"type": "BertNormalizer"}}
    tree["pre_tokenizer"] = {"type": "BertPreTokenizer"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert read.read_tokenizer(tmp_path).vocab_size == 6
    bert = {"clean_text": False, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    kept = tree | {
        "normalizer": tree["normalizer"] | bert,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(kept))
    assert read.read_tokenizer(tmp_path).encode_batch(["a\u200c", "a"]) == [[1], [5]]
    for part, kind in (("normalizer", "Lowercase"), ("normalizer", None), ("pre_tokenizer", "Whitespace")):
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree | {part: kind and {"type": kind}}))
        with pytest.raises(ValueError, match=f"tokenizer.json: {part} is {kind!r}, only 'Bert"):
            read.read_tokenizer(tmp_path)


def made(folder: Path, kind: str) -> Any:
    """A model of that class with every parameter random; DistilBERT's fields have names of their own."""
    changes = DISTIL if kind.startswith("DistilBert") else {}
    changes |= SIZES if kind.startswith("ModernBert") else {}
    changes |= {"embedding_size": 32} if kind.startswith("Electra") else {}
    return make(folder, kind, **changes)


def compare(folder: Path, peer: Any) -> pretrained.Pretrained:
    """The last hidden states of two sequences, packed by us, with the encoder of `peer`; the model read."""
    found = pretrained.load(folder)
    draw = np.random.default_rng(2)
    texts = [draw.integers(10, found.config.model.vocab_size, length, np.int32) for length in (9, 23)]
    batch = pack(texts, [9, 23], 40)
    hidden = found.model(CPU).encode(**batch.inputs()).flatten(0, 1)
    for text, start in zip(texts, batch.starts, strict=True):
        want = peer.base_model(torch.from_numpy(text).long()[None]).last_hidden_state[0]
        assert want.std() > 0.1 and (hidden[start : start + len(text)] - want).abs().max() <= 1e-5
    return found


@pytest.mark.parametrize("family", ["Bert", "ModernBert", "DistilBert", "Electra"])
@pytest.mark.parametrize("ending", ENDINGS)
@torch.no_grad()
def test_encoder_of_a_fine_tuned_class_is_read(family: str, ending: str, tmp_path: Path, capsys) -> None:
    peer = made(tmp_path / "hf", f"{family}For{ending}")
    (tmp_path / "hf/tokenizer_config.json").write_text('{"do_lower_case": true}')
    found = compare(tmp_path / "hf", peer)
    added = "qa_outputs" if ending == "QuestionAnswering" and family != "ModernBert" else "classifier"
    assert any(name.startswith(f"{added}.") for name in found.ignored)
    if family == "ModernBert":  # its classes share the transform in front of their last layers
        states = torch.randn(3, 32)
        assert (found.model(CPU).mlm(states) - peer.head(states)).abs().max() <= 1e-6
        assert found.initialised == ("masked-LM head (decoder.bias)",)
    pooled = family == "Bert" and ending == "SequenceClassification"
    assert ("pooler.weight" in found.weights) == found.config.model.nsp == pooled
    assert "has no masked-LM head" in refusal(capsys, fill.main, "--model", tmp_path / "hf", "the [MASK]")
    with pytest.raises(ValueError, match="has no masked-LM head"):
        megabert.load(tmp_path / "hf").logits("a text")


@pytest.mark.parametrize("kind", [*RELATIVES, "DistilBertModel", "ElectraModel", "ElectraForPreTraining"])
@torch.no_grad()
def test_a_relative_has_transformers_own_numbers(kind: str, tmp_path: Path) -> None:
    """With a masked-LM head logits too, of its folder and of the BERT that it is exported as."""
    peer = made(tmp_path / "hf", kind)
    found = compare(tmp_path / "hf", peer)
    if kind not in RELATIVES:
        assert found.initialised == ("masked-LM head",)
        return
    assert found.initialised == found.ignored == () and not found.config.model.nsp
    ids, model = torch.arange(10, 40)[None], found.model(CPU)
    logits, want = model.mlm_logits(model.encode(**unpacked_inputs(ids))[0]), peer(ids).logits[0]
    assert want.std() > 0.05 and (logits - want).abs().max() <= 1e-5
    convert.convert(tmp_path / "hf", tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "back")
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back").eval()
    assert type(back).__name__ == "BertForMaskedLM" and (back(ids).logits[0] - want).abs().max() <= 1e-5


@torch.no_grad()
def test_what_transformers_does_not_read_changes_nothing(tmp_path: Path) -> None:
    """DistilBERT's fields of BERT, and of an untied decoder the bias that it shares with none."""
    peer = made(tmp_path / "distil", "DistilBertForMaskedLM")
    tree = json.loads((tmp_path / "distil/config.json").read_text())
    tree |= {"layer_norm_eps": 0.1, "type_vocab_size": 1, "is_decoder": True}
    (tmp_path / "distil/config.json").write_text(json.dumps(tree))
    assert not compare(tmp_path / "distil", peer).config.data.masking.causal
    peer = make(tmp_path / "untied", "BertForMaskedLM", tie_word_embeddings=False)
    found, ids = pretrained.load(tmp_path / "untied"), torch.arange(10, 40)[None]
    model, want = found.model(CPU), peer(ids).logits[0]
    assert not peer.cls.predictions.decoder.bias.equal(peer.cls.predictions.bias)
    assert (model.mlm_logits(model.encode(**unpacked_inputs(ids))[0]) - want).abs().max() <= 1e-5


def test_electras_token_types_are_asked_for(tmp_path: Path) -> None:
    made(tmp_path / "hf", "ElectraForMaskedLM")
    rewrite(tmp_path / "hf", lambda state: {name: t for name, t in state.items() if "token_type" not in name})
    with pytest.raises(ValueError, match=r"no tensor named bert\.embeddings\.token_type_embeddings\.weight"):
        pretrained.load(tmp_path / "hf")


def test_embeddings_narrower_than_the_layers_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "hf", "ElectraForMaskedLM", embedding_size=16)
    with pytest.raises(ValueError, match=r"embedding_size=16 differs from hidden_size=32, .* \(embeddings_project\)"):
        pretrained.load(tmp_path / "hf")
    edit(tmp_path / "hf/config.json", '"embedding_size": 16,', "")  # 128 in transformers' class
    with pytest.raises(ValueError, match="embedding_size=128 differs from hidden_size=32"):
        pretrained.load(tmp_path / "hf")


CALLS = """
import sys
from megabert.commands import convert, evaluate, fill
codes = [fill.main(["--model", "some/bert", "the [MASK] fox"]), fill.main(["--model", "some/bret", "the [MASK]"])]
codes += [convert.main(["--model", "some/bert", "--run", sys.argv[1]])]
print(codes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
def test_a_hub_name_is_downloaded_once(old: bool, model_hub, tmp_path) -> None:
    run = runs.make(tmp_path / "run", "uncased")
    export.export(run, tmp_path / "hf")
    if old:
        torch.save(load_file(tmp_path / "hf/model.safetensors"), tmp_path / "hf/pytorch_model.bin")
        (tmp_path / "hf/model.safetensors").unlink()
    model_hub.add("models/some/bert", PUBLIC, contents(tmp_path / "hf"))
    done = command("-c", CALLS, tmp_path / "start")
    model_hub.close()
    assert "[0, 2, 0]" in done.stdout and done.stdout.startswith("[MASK]  "), done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert "error: some/bret: no such folder, and the hub has no public model of that name" in done.stderr
    assert (tmp_path / "start/config.toml").is_file()
    away = command("-c", CALLS, tmp_path / "start2")
    assert "[0, 4, 0]" in away.stdout and away.stdout.splitlines()[0] == done.stdout.splitlines()[0]
    assert "some/bret: no such folder, and the hub cannot be reached" in away.stderr


def test_a_wrong_path_never_asks_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs", "some"):
        (tmp_path / name).mkdir()
    for wrong in ("runs/mni", "nowhere", "/absent/run", "./a/b", "runs/mini/checkpoints", "a b/c"):
        with pytest.raises(ValueError, match=r"no such folder; name a run folder, .* OWNER/NAME"):
            model_folder(wrong)
    with pytest.raises(ValueError, match=r"^runs: no checkpoint in it, .* no model.safetensors or pytorch_model.bin, "):
        model_folder("runs")
    files = "run/checkpoints/step-00000001/manifest.json", "tuned/best/model.safetensors", "old/pytorch_model.bin"
    for path in map(Path, files):
        path.parent.mkdir(parents=True)
        path.touch()
        for folder in (path.parent, path.parents[-2]):
            assert model_folder(folder) == folder

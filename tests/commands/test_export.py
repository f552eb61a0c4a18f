"""What is exported loads in transformers and sentence-transformers; what cannot be is one line and no folder."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open

from megabert import config, hf
from megabert.checkpoint import load_weights
from megabert.commands import convert, export
from megabert.commands.extraction import Extractor
from megabert.hf import model_card
from megabert.model import unpacked_inputs
from tests.helpers import runs
from tests.helpers.refusal import refusal

HEADS = ("cls.", "bert.pooler.", "pooler.")
NO_NSP = [
    ({}, "BertForMaskedLM"),
    ({"tied": False, "norm": "pre"}, "MegatronBertForMaskedLM"),
    ({"kind": "modern", "norm": "pre"}, "ModernBertForMaskedLM"),
]
SENTENCES = ["She sells sea shells by the sea shore.", "dog", "The quick brown fox, " * 12]
POOLS = [("mean", {}), ("cls", {"norm": "pre"}), ("mean", {"nsp": False, "norm": "pre"}), ("cls", {"causal": True})]


def export_of(run: Path) -> Path:
    folder = run.with_name("hf")
    assert export.main(["--model", str(run), "--output", str(folder)]) == 0
    return folder


def load_peer(kind: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """transformers' model of a class that has a place for every tensor and finds all of its own: no warning."""
    transformers.logging.enable_propagation()
    caplog.clear()
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and not caplog.records, info
    assert type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    return model.eval()


@pytest.mark.parametrize(("kind", "norm"), [*((kind, "post") for kind in runs.KINDS), ("unigram", "pre")])
@torch.no_grad()
def test_every_auto_class_computes_the_same(kind: str, norm: str, tmp_path: Path, caplog) -> None:
    """What is left over are heads that a class has no place for, as with transformers' own BertForPreTraining folders."""
    run = runs.make(tmp_path / "run", kind, norm=norm)
    folder = export_of(run)
    for auto in (transformers.AutoModel, transformers.AutoModelForMaskedLM):
        _, info = auto.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["mismatched_keys"] and not info["error_msgs"]
        assert all(name.startswith(HEADS) for name in info["unexpected_keys"])
    peer = load_peer(transformers.AutoModelForPreTraining, folder, caplog)
    pretrained = hf.load(run)
    ours = pretrained.model(torch.device("cpu"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made = tokenizer("the quick fox [MASK]", "she sells shells", return_tensors="pt")
    want, segments = peer(**made), made["token_type_ids"]
    hidden = ours.encode(**unpacked_inputs(made["input_ids"], segments))[0]
    assert (ours.mlm_logits(hidden) - want.prediction_logits[0]).abs().max() <= 1e-5
    assert (ours.nsp_logits(hidden[:1]) - want.seq_relationship_logits).abs().max() <= 1e-5
    assert segments.sum() > 0 and want.prediction_logits.shape[-1] == pretrained.tokenizer.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "kind"), [({}, "unigram"), ({"kind": "modern", "norm": "pre", "nsp": False}, "uncased")]
)
def test_onnx_of_a_run_fills_masks(fields: dict[str, Any], kind: str, tmp_path: Path, capsys) -> None:
    import onnxruntime

    run, folder = runs.make(tmp_path / "run", kind, fields=fields), tmp_path / "hf"
    assert export.main(["--model", str(run), "--output", str(folder), "--onnx"]) == 0
    assert "onnx/model.onnx: logits within" in capsys.readouterr().out
    made = dict(transformers.AutoTokenizer.from_pretrained(folder)("the quick fox [MASK]", return_tensors="np"))
    session = onnxruntime.InferenceSession(folder / "onnx/model.onnx")
    (logits,) = session.run(None, {entry.name: made[entry.name] for entry in session.get_inputs()})
    pretrained = hf.load(run)
    ours = pretrained.model(torch.device("cpu"))
    with torch.no_grad():
        hidden = ours.encode(**unpacked_inputs(torch.from_numpy(made["input_ids"])))[0]
        want = ours.mlm_logits(hidden)[:, : pretrained.tokenizer.vocab_size]
    assert abs(want.numpy() - logits[0]).max() <= 1e-4


def test_files_of_an_export_are_replaced_when_asked(tmp_path: Path, capsys) -> None:
    run = runs.make(tmp_path / "run")
    folder = export_of(run)
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in folder.iterdir()} == names | {"README.md", "tokenizer.model"}
    assert (folder / "tokenizer.model").read_bytes() == (run / "tokenizer.model").read_bytes()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert not any("decoder" in name for name in file.keys())  # noqa: SIM118
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    (folder / "extra").write_text("1")
    command = ["--model", str(run), "--output", str(folder)]
    refused = refusal(capsys, export.main, *command)
    assert "hf: is not empty; name another folder, or give --overwrite\n" in refused and (folder / "extra").is_file()
    assert export.main([*command, "--overwrite"]) == 0
    of_a_run = refusal(capsys, export.main, "--model", run, "--output", run, "--overwrite")
    assert "so it is not what --overwrite would replace" in of_a_run and (run / "checkpoints").is_dir()
    assert {path.name for path in folder.iterdir()} == names | {"README.md", "tokenizer.model"}


@pytest.mark.parametrize(("fields", "kind"), NO_NSP)
@torch.no_grad()
def test_without_next_sentences_it_is_a_masked_lm(fields: Any, kind: str, tmp_path: Path, capsys, caplog) -> None:
    """Read again it is the run; a modern model's tokenizer gives it no segments."""
    run, modern = runs.make(tmp_path / "run", nsp=False, fields=fields), "kind" in fields
    folder = export_of(run)
    assert ("no next-sentence head" in capsys.readouterr().out) is not modern
    peer = load_peer(transformers.AutoModelForMaskedLM, folder, caplog)
    assert type(peer).__name__ == kind
    inputs = transformers.AutoTokenizer.from_pretrained(folder)("the quick fox", return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"} | (set() if modern else {"token_type_ids"})
    assert torch.isfinite(peer(**inputs).logits).all()
    again, weights = hf.load(folder), load_weights(run)[0]
    assert again.initialised == () and again.weights.keys() == weights.keys()
    assert all(again.weights[name].equal(weights[name]) for name in weights)


@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_a_causal_run_computes_the_same_as_decoder(norm: str, tmp_path: Path, capsys, caplog) -> None:
    run = runs.make(tmp_path / "run", causal=True, norm=norm)
    folder = export_of(run)
    assert "is_decoder=true" in capsys.readouterr().out
    peer = load_peer(transformers.AutoModelForCausalLM, folder, caplog)
    pretrained = hf.load(run)
    ours, tokenizer = pretrained.model(torch.device("cpu")), transformers.AutoTokenizer.from_pretrained(folder)
    made = tokenizer("the quick fox", "she sells shells", return_tensors="pt")
    hidden = ours.encode(**unpacked_inputs(made["input_ids"], made["token_type_ids"], causal=True))[0]
    assert (ours.mlm_logits(hidden) - peer(**made).logits[0]).abs().max() <= 1e-5
    assert convert.main(["--model", str(folder), "--run", str(tmp_path / "back")]) == 0
    assert "pre-training continues causally" in capsys.readouterr().out
    again = hf.load(tmp_path / "back")
    assert again.config.data.masking.causal and not again.config.model.nsp
    assert pretrained.weights.keys() == again.weights.keys()
    assert all(tensor.equal(again.weights[name]) for name, tensor in pretrained.weights.items())
    continued = config.load(str(tmp_path / "back" / "config.toml"))
    assert continued.model == again.config.model and continued.data.masking.causal
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card and "AutoModelForCausalLM" in card and "fill-mask" not in card


def test_a_checkpoint_and_a_tokenizer_can_be_named(tmp_path: Path, capsys) -> None:
    run = runs.make(tmp_path / "run")
    moved = shutil.move(run / "tokenizer.model", tmp_path / "kept.model")
    command = ["--model", str(run / "checkpoints" / "step-00000000"), "--output", str(tmp_path / "hf")]
    assert "name the file with --tokenizer" in refusal(capsys, export.main, *command)
    assert export.main([*command, "--tokenizer", str(moved)]) == 0


def test_the_card_gives_the_runs_settings_and_figures(tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run")
    # the last whole line is after the checkpoint
    first = {"step": 0, "eval/mlm_loss": 3.25, "eval/mlm_accuracy": 0.125, "perf/tokens_per_sec": 1234.5}
    lines = [json.dumps(line) for line in (first, {"step": 7, "eval/mlm_loss": 1.5})]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 0, "eval/ml']))
    pretrained = hf.load(run)
    changes: dict[str, Any] = {"init_from": "/a/b/first", "distill": {"teacher": "/a/b/big"}}
    changes["data"] = {"path": "/a/b/data", "mix": {"/a/b/more": 0.5}}
    changes["phases"] = [
        {"share": 0.5, "data": {"path": "/a/b/first", "mix": {"/a/b/third": 0.5}}},
        {"share": 0.5, "optimizer": {"lr": 0.002}},
    ]
    cfg = config.from_dict(pretrained.config.model_dump() | changes)
    card = model_card.render(dataclasses.replace(pretrained, config=cfg), "my-model", "BertForPreTraining")
    assert card.startswith("---\nlibrary_name: transformers\n") and "\n# my-model\n" in card
    for row in (
        "| masked-LM loss, held out | 3.25 (update 0) |",
        "| masked-LM accuracy, held out | 0.125 (update 0) |",
        "| next-sentence accuracy, held out | not measured |",
        "| model FLOPs utilisation | not measured |",
        "| updates | 0 |",
        "| model.layers | 2 |",
        "| init_from | first |",
        "| distill.teacher | big |",
        "| phases.1.share | 0.5 |",
        "| phases.2.optimizer.lr | 0.002 |",
        f"| dataset fingerprint | {'d' * 64} |",
    ):
        assert row in card, row
    assert "1.5" not in card and "a/b" not in card


def test_a_refused_export_leaves_no_folder(tmp_path: Path, capsys) -> None:
    run, large = runs.make(tmp_path / "run"), runs.make(tmp_path / "large", vocab_size=300)
    causal, other = runs.make(tmp_path / "causal", causal=True), runs.tokenizer(tmp_path / "other", "cased").path
    for model, more, message in (
        (run, ("--tokenizer", other), "is not the tokenizer that"),
        (run, ("--tokenizer", tmp_path / "none"), ": no such file"),
        (large, (), "but the model has 300"),
        (causal, ("--onnx",), "--onnx: the run is causal"),
    ):
        assert message in refusal(capsys, export.main, "--model", model, "--output", tmp_path / "hf", *more)
    with (run / "checkpoints/step-00000000/weights-00000-of-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert "no usable checkpoint" in refusal(capsys, export.main, "--model", run, "--output", tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["causal", "large", "other", "run"]


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "fields"), POOLS, ids=["post mean", "pre cls", "no pooler", "causal"])
@pytest.mark.parametrize("kind", ["uncased", "unigram"])
def test_sentence_transformers_gives_our_vectors(kind: str, pool: str, fields: Any, tmp_path, capsys) -> None:
    from sentence_transformers import SentenceTransformer

    run, folder = runs.make(tmp_path / "run", kind, **fields), tmp_path / "out"
    assert export.main(["--model", str(run), "--output", str(folder), "--sentence-transformers", pool]) == 0
    assert f"a SentenceTransformer of {pool} vectors of step 0" in capsys.readouterr().out
    start, peer = hf.load(run), SentenceTransformer(str(folder), device="cpu")
    assert peer.max_seq_length == 40 and peer.similarity_fn_name == "cosine"
    # none that nobody trained
    assert (peer[0].auto_model.pooler is not None) is start.config.model.nsp
    theirs = torch.from_numpy(peer.encode(SENTENCES))
    ours = F.normalize(torch.from_numpy(Extractor(start, pool=pool).encode(SENTENCES)), dim=-1)
    assert torch.allclose(ours, theirs, atol=1e-5)
    peer.save(str(tmp_path / "again"))
    for name, data in start.tokenizer.files().items():
        (tmp_path / "again" / name).write_bytes(data)
    again = hf.load(tmp_path / "again")
    encoder = [name for name in start.weights if name.startswith("layers.")]
    assert encoder and all(again.weights[name].equal(start.weights[name]) for name in encoder)

"""Any Hugging Face BERT folder becomes a run to continue from; what is none is one line, nothing run, nothing written."""

import json
import os
import pickle
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import megabert
from megabert import config, hf
from megabert.checkpoint import load_weights
from megabert.commands import average, convert, export, fill, plan
from megabert.distributed.watchdog import Watchdog
from megabert.open_run import open_run
from megabert.optim.schedule import learning_rate
from tests.helpers import runs, wordpiece
from tests.helpers.golden_runs import DATA, SMALL, trained
from tests.helpers.loop import StopAt
from tests.helpers.refusal import one_line, refusal

# it writes to stderr
transformers.logging.disable_progress_bar()
HEADS = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForPreTraining")


def make(folder: Path, kind: str = "BertForPreTraining", binary: bool = False, **changes: Any) -> Any:
    """A randomly initialised model of transformers, saved with a vocab.txt of its size; the model."""
    torch.manual_seed(4)
    tokens = len(wordpiece.write(folder.with_suffix(".txt")).read_text(encoding="utf-8").splitlines())
    fields: dict[str, Any] = {"vocab_size": tokens, "num_hidden_layers": 2, "hidden_size": 32}
    fields |= {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 40}
    cls = getattr(transformers, kind)
    peer = cls(cls.config_class(**(fields | changes))).eval()
    for parameter in peer.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    peer.save_pretrained(folder)
    if binary:
        (folder / "model.safetensors").unlink()
        torch.save(peer.state_dict(), folder / "pytorch_model.bin")
    shutil.move(folder.with_suffix(".txt"), folder / "vocab.txt")
    return peer


@pytest.mark.parametrize(("norm", "kind"), [("post", "unigram"), ("post", "uncased"), ("pre", "bpe"), ("pre", "cased")])
def test_a_run_comes_back_bit_for_bit(norm: str, kind: str, tmp_path: Path) -> None:
    """Read from its exported folder, and converted from there."""
    run = hf.load(runs.make(tmp_path / "run", kind, norm=norm))
    export.export(tmp_path / "run", tmp_path / "hf")
    assert not convert.convert(tmp_path / "hf", tmp_path / "back").ignored
    for name in ("hf", "back"):
        found = hf.load(tmp_path / name)
        assert not found.initialised and found.weights.keys() == run.weights.keys()
        assert all(run.weights[name].equal(found.weights[name]) for name in run.weights)
        assert found.config.model.model_dump() == run.config.model.model_dump() | {"intermediate": 128}
        assert found.tokenizer.sha256 == run.tokenizer.sha256
    export.export(tmp_path / "back", tmp_path / "again")
    weights = [tmp_path / name / "model.safetensors" for name in ("hf", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_config_starts_from_the_run(tmp_path: Path) -> None:
    make(tmp_path / "hf")
    run = tmp_path / "run"
    convert.convert(tmp_path / "hf", run)
    cfg = config.load(str(run / "config.toml"), ["optimizer.lr=1e-5"])
    assert cfg.init_from == str(run.resolve()) and cfg.model == hf.load(run).config.model
    sections = {"init_from", "model", "optimizer", "schedule", "batch", "checkpoint"}
    assert tomllib.loads((run / "config.toml").read_text()).keys() == sections
    plain = config.load(str(run / "config.toml"))
    assert plain.schedule.warmup_steps / plain.schedule.total_steps == 0.06
    first, peak = (learning_rate(plain.schedule, plain.optimizer.lr, step, 0.0, 0) for step in (9, 750))
    assert first > 1e-6 and peak == pytest.approx(1e-4, rel=0.01), "a rate that trains, from the first updates on"
    weights, state = load_weights(cfg.init_from)
    assert weights.keys() == runs.model(cfg.model).state_dict().keys() and state["step"] == 0


@pytest.mark.parametrize("size", [(), ("model.vocab_size=0",)], ids=["size", "shapes"])
def test_data_of_another_tokenizer_is_named(size: tuple[str, ...], world, tmp_path: Path, capsys) -> None:
    """Whether the configuration has the vocabulary's size or the weights tell, by `train` and `plan`."""
    start = tmp_path / "a start"
    make(tmp_path / "hf", max_position_embeddings=64)
    convert.convert(tmp_path / "hf", start)
    cfg = config.load(str(start / "config.toml"), [*SMALL[3:], f"data.path={DATA}", *size])
    tokens = len((start / "vocab.txt").read_text(encoding="utf-8").splitlines())
    theirs = json.loads((DATA / "manifest.json").read_text())["tokenizer"]
    says = [
        f"init_from={start} has a tokenizer of {tokens} tokens ({start}/vocab.txt), but {DATA} was built with another, of ",
        f"{theirs['vocab_size']:,} ({DATA}/tokenizer.model); build the data with the first, by `megabert prep build --tokenizer "
        f"'{start}/vocab.txt' …`, or start from the model with the second, by `megabert convert --model '{start}' --vocab {DATA} ",
    ]
    with pytest.raises(ValueError, match="has a tokenizer of") as caught:
        open_run(tmp_path / "run", cfg, world, StopAt(), Watchdog(world, tmp_path, 0.0))  # type: ignore[arg-type]
    assert all(part in str(caught.value) for part in says)
    if not size:
        shown = refusal(capsys, plan.main, "--config", start / "config.toml", "--data", DATA)
        assert all(part in shown for part in says)


@pytest.mark.parametrize("kind", [*HEADS, "BertForPreTraining --no-nsp"])
def test_next_sentence_head_is_kept_if_any(kind: str, tmp_path: Path, capsys) -> None:
    """A missing masked-LM head starts as in a new model."""
    kind, *options = kind.split()
    make(tmp_path / "hf", kind)
    assert convert.main(["--model", str(tmp_path / "hf"), "--run", str(tmp_path / "run"), *options]) == 0
    shown, found, nsp = capsys.readouterr().out, hf.load(tmp_path / "run"), kind == HEADS[3] and not options
    head = "tokens, with next-sentence head" if nsp else "tokens, without next-sentence head"
    assert f"{head}. To continue:\n  megabert prep build --tokenizer " in shown and "new model: pooler" not in shown
    assert (" --nsp --input PATH" in shown) == ("--nsp" in shown) == nsp
    left_out = "left out, as pre-training has no place for them: bert.pooler.dense.bias" in shown
    assert left_out == (not nsp and kind != "BertForMaskedLM")
    assert found.config.model.nsp == config.load(str(tmp_path / "run" / "config.toml")).model.nsp == nsp
    assert any(name.startswith(("pooler", "nsp")) for name in found.weights) == nsp
    new = kind in ("BertModel", "BertForSequenceClassification")
    assert ("initialised as in a new model: masked-LM head\n" in shown) == new
    assert not new or 0.01 < found.weights["mlm.weight"].std() < 0.03
    assert found.initialised == (("masked-LM head",) if new else ())


def test_drawn_heads_stay_untrained_in_every_copy(tmp_path: Path, world, capsys) -> None:
    """Until they are trained, in memory or from there."""
    make(tmp_path / "hf", "BertModel", max_position_embeddings=512, num_hidden_layers=1, intermediate_size=128)
    convert.convert(tmp_path / "hf", tmp_path / "run")
    convert.convert(tmp_path / "run", tmp_path / "other", vocab=DATA)
    loaded = megabert.load(tmp_path / "run")
    loaded.save(tmp_path / "saved")
    for name in ("run", "other", "saved"):
        said = refusal(capsys, fill.main, "--model", tmp_path / name, "the [MASK]")
        assert "has no masked-LM head" in said
    loaded.model.mlm.weight.data += 1
    loaded.save(tmp_path / "changed")
    assert hf.load(tmp_path / "changed").initialised == ()
    trained(world, tmp_path / "next", f"init_from={tmp_path / 'other'}", "model.nsp=false", "checkpoint.interval=1",
            "checkpoint.keep=2")  # fmt: skip
    average.average(tmp_path / "next", tmp_path / "mean")
    assert hf.load(tmp_path / "next").initialised == hf.load(tmp_path / "mean").initialised == ()


def test_names_of_the_first_releases_and_further_heads(tmp_path: Path, capsys) -> None:
    """LayerNorm.gamma and .beta, saved position ids, half precision, a classifier on top."""
    peer, state = make(tmp_path / "hf", binary=True), {}
    for name, tensor in peer.state_dict().items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        state[name] = tensor.half()
    state |= {"bert.embeddings.position_ids": torch.arange(40)[None], "classifier.weight": torch.zeros(2, 32)}
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin")
    assert convert.main(["--model", str(tmp_path / "hf"), "--run", str(tmp_path / "run")]) == 0
    assert "left out, as pre-training has no place for them: classifier.weight\n" in capsys.readouterr().out
    weights = hf.load(tmp_path / "run").weights
    want = peer.half().float().bert.encoder.layer[1].output.LayerNorm.weight
    assert weights["layers.1.feed_forward_output.norm_weight"].equal(want)


def test_the_tokenizer_can_be_named(tmp_path: Path, capsys) -> None:
    make(tmp_path / "hf")
    vocab = shutil.move(tmp_path / "hf" / "vocab.txt", tmp_path / "tokens")
    command = ["--model", str(tmp_path / "hf"), "--run", str(tmp_path / "run")]
    assert "holds no tokenizer" in refusal(capsys, convert.main, *command)
    assert convert.main([*command, "--tokenizer", str(vocab)]) == 0
    assert (tmp_path / "run" / "vocab.txt").is_file()


class Malicious:
    """Unpickled, it makes the folder `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("zipped", [True, False], ids=["torch-zip", "bare-pickle"])
def test_a_pickle_with_code_is_refused_unrun(zipped: bool, tmp_path: Path, capsys) -> None:
    peer = make(tmp_path / "hf", binary=True)
    place, file = tmp_path / "hacked", tmp_path / "hf" / "pytorch_model.bin"
    state = dict(peer.state_dict()) | {"bert.evil": Malicious(place)}
    if zipped:
        torch.save(state, file)
    else:
        file.write_bytes(pickle.dumps({"bert.evil": Malicious(place)}))
    assert convert.main(["--model", str(tmp_path / "hf"), "--run", str(tmp_path / "run")]) == 2
    assert "a pickle can hold code: nothing of it was run" in one_line(capsys)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    # it would have
    pickle.loads(pickle.dumps(Malicious(place)))
    assert place.is_dir()


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def pickled(folder: Path, change: Any) -> Path:
    file, path = folder / "model.safetensors", folder / "pytorch_model.bin"
    torch.save(change(load_file(file)), path)
    file.unlink()
    return path


def index(folder: Path, files: dict[str, str]) -> None:
    """In the place of the weights an index of several files."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def edit(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: t for name, t in state.items() if name not in names}


BIAS, QUERY = "cls.predictions.bias", "bert.encoder.layer.1.attention.self.query.weight"
DECODER, WORDS = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
WRONG: dict[str, tuple[Any, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: not found"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors or pytorch_model.bin, so it is not a Hugging Face folder"),
    "weights cut": (lambda f: os.truncate(f / "model.safetensors", 5000), "cannot be read as weights"),
    "index without files": (lambda f: index(f, {}), "model.safetensors.index.json: weight_map names no files"),
    "a file of several is missing": (lambda f: index(f, {QUERY: "1-of-2.safetensors"}), "1-of-2.safetensors: not found"),
    "tensor missing": (lambda f: rewrite(f, lambda s: without(s, QUERY)), f"no tensor named {QUERY}"),
    "half a head": (lambda f: rewrite(f, lambda s: without(s, BIAS)), f"no tensor named {BIAS}"),
    "another shape": (lambda f: rewrite(f, lambda s: s | {QUERY: torch.zeros(32, 16)}), f"{QUERY} is [32, 16]"),
    "quantised": (lambda f: rewrite(f, lambda s: s | {QUERY: s[QUERY].to(torch.int8)}), "is not a floating-point tensor"),
    "decoder not tied": (lambda f: rewrite(f, lambda s: s | {DECODER: s[WORDS] + 1}), "is not the word embedding"),
    "tokenizer of another size": (lambda f: edit(f / "vocab.txt", "the\n", "the\nmore\n"), "vocab_size="),
    "a sparse tensor": (lambda f: pickled(f, lambda s: s | {QUERY: s[QUERY].to_sparse()}), "query.weight is not a floating-point tensor"),
    "a short pickle": (lambda f: os.truncate(pickled(f, lambda s: s), 9_000), "pytorch_model.bin: cannot be read as weights"),
    "a tensor twice": (lambda f: rewrite(f, lambda s: s | {QUERY[5:]: s[QUERY] + 1}), "query.weight is there twice, with other"),
    "too many layers": (lambda f: edit(f / "config.json", '_layers": 2', '_layers": 9999'), "too few tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_refused_conversion_leaves_no_folder(case: str, tmp_path: Path, capsys) -> None:
    change, message = WRONG[case]
    make(tmp_path / "hf")
    change(tmp_path / "hf")
    assert message in refusal(capsys, convert.main, "--model", tmp_path / "hf", "--run", tmp_path / "run")
    assert {p.name for p in tmp_path.iterdir()} <= {"hf"}

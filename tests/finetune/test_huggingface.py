"""Exported fine-tuned models in transformers: the same logits on full, padded and windowed input, the same predictions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy import special

import megabert
from megabert.commands import convert, export
from megabert.distributed.ranks import discover
from megabert.finetune import files, huggingface, run, save, scores, tasks
from megabert.finetune.encoding import TaskItem
from megabert.finetune.prediction import compute_logits
from megabert.finetune.save import Finetuned
from megabert.finetune.settings import Settings
from megabert.finetune.tasks import Task
from megabert.hf import onnx
from tests.helpers import finetuned
from tests.helpers.refusal import refusal

CPU = torch.device("cpu")
LONG = "she sells sea shells by the sea shore and the shells she sells are surely sea shells " * 2
TEXTS = ["the quick brown fox", "shells", "the lazy dog sleeps near the river bank", LONG.strip()]
CONTEXT = "The quick brown fox jumps over the lazy dog near the river bank, 2,666 times. " + LONG
KINDS = ("classify", "pair", "score", "tag", "span", "multilabel")
AUTO = {"tag": transformers.AutoModelForTokenClassification, "span": transformers.AutoModelForQuestionAnswering}


def problem(kind: str, folder: Path) -> tuple[Task, Path]:
    """A task and a labelled file of it; its texts are short, padded against each other, and longer than the model."""
    if kind == "span":
        answers, path = [{"text": "fox", "answer_start": CONTEXT.index("fox")}], folder / "squad.json"
        asked = {"who jumps over the dog": "q0", "who": "q1"}
        qas = [{"id": i, "question": question, "answers": answers} for question, i in asked.items()]
        path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": [{"context": CONTEXT, "qas": qas}]}]}))
        return tasks.preset("squad1.1"), path
    path = folder / "texts.tsv"
    if kind == "tag":
        tags = ("O", "B-A", "I-A")
        blocks = ([f"{word} {tags[i % 3]}\n" for i, word in enumerate(text.split())] for text in TEXTS)
        path.write_text("\n".join(map("".join, blocks)))
        return tasks.custom("tag", metrics=["accuracy"]), path
    labels = {"score": ["1.5", "2", "0", "4"], "multilabel": ["bad,old", "good", "", "bad"]}
    seconds = ["the dog", LONG.strip(), "the shells", "a fox"]
    rows = zip(TEXTS, seconds, labels.get(kind, ["bad", "good", "fine", "bad"]), strict=True)
    path.write_text("\n".join(map("\t".join, [("a", "b", "label"), *rows])) + "\n")
    columns = ["a", "b"] if kind == "pair" else ["a"]
    return tasks.custom("classify" if kind == "pair" else kind, columns, "label"), path  # type: ignore[arg-type]


def exported(kind: str, folder: Path, **made: Any) -> tuple[Finetuned, Path, Path]:
    """(the model, its Hugging Face folder, the labelled file)"""
    task, path = problem(kind, folder)
    source = finetuned.make(folder, task, path, **made)
    assert export.main(["--model", str(source), "--output", str(folder / "hf")]) == 0
    return save.load(source, CPU), folder / "hf", path


def encoded(found: Finetuned, path: Path) -> tuple[list[Any], list[TaskItem], list[np.ndarray]]:
    """Examples, their items, and our logits of these."""
    examples = files.read(found.described.task, path)
    items = found.items(found.described.task, examples)
    return examples, items, compute_logits(found.module, items, found.described.layout, discover({}))


def loaded(kind: str, folder: Path) -> Any:
    auto = AUTO.get(kind, transformers.AutoModelForSequenceClassification)
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return model.eval()


def some(first: list[Any], others: list[Any]) -> list[Any]:
    """Cases of which the others, that differ little, are for the slow tests."""
    return [*first, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


SHORT = [(kind, "uncased", "post") for kind in ("classify", "tag", "span")]
SHORT += [(kind, "unigram", "modern") for kind in ("pair", "tag", "span")]
SHORT += [(kind, "uncased", "nomic") for kind in ("pair", "tag")]
ALL = [(kind, *one) for kind in KINDS for one in (("uncased", "post"), ("unigram", "pre"), ("unigram", "modern"))]
ALL += [(kind, "unigram", "nomic") for kind in KINDS if kind != "span"]
FIELDS: dict[str, dict[str, Any]] = {
    "post": {"norm": "post"}, "pre": {"norm": "pre"}, "modern": {"kind": "modern", "norm": "pre", "nsp": False},
    "nomic": {"kind": "nomic", "norm": "post", "nsp": False, "activation": "silu"},
}  # fmt: skip
CLASSES = {"post": "Bert", "pre": "MegatronBert", "modern": "ModernBert", "nomic": "NomicBert"}
EUROBERT = FIELDS["modern"] | {"activation": "silu", "rms_norm": True, "embedding_norm": False, "transform": False}
EUROBERT |= {"decoder_bias": False, "bias": False, "dropout": 0.0}
OTHER_HEAD = "EuroBertForSequenceClassification has other layers behind its encoder"


@pytest.mark.parametrize("kind, vocabulary, norm", some(SHORT, [case for case in ALL if case not in SHORT]))
@torch.no_grad()
def test_logits_equal_transformers(kind: str, vocabulary: str, norm: str, tmp_path: Path) -> None:
    found, folder, path = exported(kind, tmp_path, vocabulary=vocabulary, fields=FIELDS[norm])
    model = loaded(kind, folder)
    assert type(model).__name__.startswith(CLASSES[norm])
    _, items, ours = encoded(found, path)
    shape = len(items), max(len(item.ids) for item in items)
    assert shape[1] == finetuned.LENGTH and len({len(item.ids) for item in items}) > 1
    inputs = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    for row, item in enumerate(items):
        inputs["input_ids"][row, : len(item.ids)] = torch.from_numpy(item.ids)
        inputs["attention_mask"][row, : len(item.ids)] = 1
        inputs["token_type_ids"][row, item.second : len(item.ids)] = 1
    if norm == "modern":
        del inputs["token_type_ids"]
    outputs = [value.numpy() for value in model(**inputs).to_tuple()]
    # start and end of a span are two outputs
    theirs = np.stack(outputs[:2], -1) if kind == "span" else outputs[0]
    for row, (item, values) in enumerate(zip(items, ours, strict=True)):
        want = theirs[row, item.positions] if kind in ("tag", "span") else theirs[row]
        assert np.abs(values - want).max() <= 1e-5
    assert np.ptp(np.concatenate(ours)) > 1e-3


@pytest.mark.parametrize("kind", some(["multilabel"], [("classify",), ("pair",), ("score",)]))
def test_text_classification_pipeline_agrees(kind: str, tmp_path: Path) -> None:
    found, folder, path = exported(kind, tmp_path)
    examples, items, ours = encoded(found, path)
    pipe = transformers.pipeline("text-classification", str(folder), device="cpu")
    texts = [{"text": e.a, "text_pair": e.b} if e.b else e.a for e in examples]
    labels = found.described.labels
    decided = scores.decode(found.described.task, examples, items, ours, labels)
    for text, logits, prediction in zip(texts, ours, decided, strict=True):
        answer = pipe(text, truncation=True, top_k=None)
        got = {entry["label"]: entry["score"] for entry in answer}
        shares = {"score": lambda x: x, "multilabel": special.expit}.get(kind, special.softmax)(logits)
        assert got == pytest.approx(dict(zip(labels or ["score"], shares.tolist(), strict=True)), abs=1e-5)
        if kind == "multilabel":
            assert prediction == [name for name in labels if got[name] > 0.5]
        elif kind != "score":
            assert prediction == answer[0]["label"]


@pytest.mark.parametrize("norm", ["post", "modern"])
def test_exported_threshold_predicts_the_same_labels(norm: str, tmp_path: Path, caplog) -> None:
    """Above a half, where half of the texts are above the chosen probability."""
    task, path = tasks.custom("classify", ["text"], "label", ["f1"]), tmp_path / "texts.tsv"
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(TEXTS)))
    source = finetuned.make(tmp_path, task, path, fields=FIELDS[norm])
    found = save.load(source, CPU)
    examples, items, ours = encoded(found, path)
    odds = float(np.median(scores.margins(ours)))
    described = replace(found.described, threshold=float(special.expit(odds)))
    save.save(source, described, found.module.state_dict(), found.tokenizer, {})
    assert export.main(["--model", str(source), "--output", str(tmp_path / "hf")]) == 0
    want = scores.decode(task, examples, items, ours, described.labels, described.threshold)
    answers = transformers.pipeline("text-classification", str(tmp_path / "hf"), device="cpu")(TEXTS, truncation=True)
    assert [answer["label"] for answer in answers] == want and sorted(want) == ["0", "0", "1", "1"]
    assert scores.decode(task, examples, items, ours, described.labels) != want
    assert f"--threshold f1: 1 is predicted above {described.threshold:.6g}, in the export above a half" in caplog.text


def test_config_and_card_describe_the_outputs(tmp_path: Path) -> None:
    found, folder, _ = exported("classify", tmp_path)
    tree = json.loads((folder / "config.json").read_text())
    assert tree["architectures"] == ["BertForSequenceClassification"]
    assert tree["id2label"] == {"0": "bad", "1": "fine", "2": "good"} and tree["label2id"]["good"] == 2
    assert tree["problem_type"] == "single_label_classification"
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == finetuned.LENGTH
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "| labels | `bad`, `fine`, `good` |" in card
    assert "| accuracy | 0.7500 |" in card and str(tmp_path) not in card
    described = replace(found.described, threshold=0.3)
    decided = replace(found, described=described, results={"settings": {"threshold": "f1"}})
    shown = "| threshold | `fine` where its probability in training's terms is above 0.3, here above a half (the bias differs) |"
    assert shown in huggingface.card(decided, "m")


def test_roberta_has_two_separators_between_texts(tmp_path: Path) -> None:
    """In the items of a task and in the exported tokenizer; in a model saved before, one in both."""
    shape = {"nsp": False, "segments": 1, "first_position": 1, "hub_type": "roberta"}
    found, folder, path = exported("span", tmp_path, fields=shape)
    _, short = files.read(found.described.task, path)
    for separators, made in ((2, folder), (1, tmp_path / "old")):
        items = found.items(found.described.task, [short])
        assert items[0].ids.tolist().count(found.tokenizer.sep_id) == separators + 1
        peer = transformers.AutoTokenizer.from_pretrained(made)
        room = {"truncation": "only_second", "max_length": finetuned.LENGTH, "stride": 4}
        assert peer(short.question, short.context, **room)["input_ids"] == items[0].ids.tolist()
        if separators > 1:
            found = replace(found, described=replace(found.described, separators=1))
            (tmp_path / "old").mkdir()
            huggingface.write(found, tmp_path / "old")
    start = run.load_start(str(tmp_path / "run"), "")
    assert run.common_settings(found.described.task, (), start, {}, Settings(), 0)["separators"] == 2


@pytest.mark.parametrize(("kind", "made", "message"), [
    ("tag", {"causal": True}, "BERT has no causal encoder"),
    ("span", {"fields": FIELDS["nomic"]}, "Hugging Face has no NomicBertForQuestionAnswering"),
    ("classify", {"vocabulary": "unigram", "fields": EUROBERT, "settings": {"dropout": 0.0}}, OTHER_HEAD),
    ("classify", {"vocabulary": "unigram", "fields": EUROBERT, "settings": {"dropout": 0.1}}, OTHER_HEAD),
])  # fmt: skip
def test_what_has_no_hugging_face_class_is_refused(kind: str, made: Any, message: str, tmp_path, capsys) -> None:
    source = finetuned.make(tmp_path, *problem(kind, tmp_path), **made)
    assert message in refusal(capsys, export.main, "--model", source, "--output", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_options_of_other_models_are_refused(tmp_path: Path, capsys) -> None:
    task, path = problem("tag", tmp_path)
    source, run = finetuned.make(tmp_path, task, path), tmp_path / "run"
    for words, option in (((source, "--tokenizer", path), "--tokenizer: is for runs"),
                          ((run, "--onnx", "--sentence-transformers", "mean"), "--onnx: sentence-transformers makes")):  # fmt: skip
        assert option in refusal(capsys, export.main, "--output", tmp_path / "hf", "--model", *words)
        assert not (tmp_path / "hf").exists()


def test_frozen_models_that_read_other_layers_stay(tmp_path: Path, capsys) -> None:
    task, path = problem("classify", tmp_path)
    for layers in ("1+2", "1,2"):
        source = finetuned.make(tmp_path / layers, task, path, {"freeze": True, "layers": layers})
        for more in ([], ["--onnx"]):
            said = refusal(capsys, export.main, "--model", source, "--output", tmp_path / "hf", *more)
            assert f"its added layer reads --layers {layers}" in said
    assert not (tmp_path / "hf").exists() and save.load(source, CPU).described.layers == "1,2"
    for folder in (source, source.parent):
        with pytest.raises(ValueError, match="is a fine-tuned model; predict with megabert finetune --predict"):
            megabert.load(folder)
        said = refusal(capsys, convert.main, "--model", folder, "--run", tmp_path / "run")
        assert f"{folder}: is a fine-tuned model; predict with" in said
    # the number of the last layer
    exported("classify", tmp_path, settings={"freeze": True, "layers": "2"})


@pytest.mark.slow
@pytest.mark.filterwarnings("error:# The axis name")
@pytest.mark.parametrize("kind, norm", [("pair", "pre"), ("tag", "modern"), ("span", "post"), ("classify", "nomic")])
@torch.no_grad()
def test_onnx_in_onnxruntime(kind: str, norm: str, tmp_path: Path, monkeypatch, capsys) -> None:
    import onnxruntime

    task, path = problem(kind, tmp_path)
    source = finetuned.make(tmp_path, task, path, fields=FIELDS[norm], vocabulary="unigram")
    assert export.main(["--model", str(source), "--output", str(tmp_path / "hf"), "--onnx"]) == 0
    assert "onnx/model.onnx: logits within" in capsys.readouterr().out
    inputs = onnx.probe(save.load(source, CPU).described.config.model, 2, 16)
    want = loaded(kind, tmp_path / "hf")(**inputs).to_tuple()
    mask = inputs["attention_mask"].numpy().astype(bool) if kind in ("tag", "span") else slice(None)
    session = onnxruntime.InferenceSession(tmp_path / "hf/onnx" / onnx.WHOLE)
    assert [entry.name for entry in session.get_inputs()] == list(inputs)
    got = session.run(None, {key: value.numpy() for key, value in inputs.items()})
    assert max(np.abs(a.numpy() - b)[mask].max() for a, b in zip(want, got, strict=True)) < 1e-4

    def broken(self: Any, *given: Any) -> list[np.ndarray]:
        return [np.full_like(values, np.nan) for values in run(self, *given)]

    run, again = onnxruntime.InferenceSession.run, ["--model", str(source), "--output", str(tmp_path / "no"), "--onnx"]
    for owner, name, value, message in (
        (onnxruntime.InferenceSession, "run", broken, "differ from the model's by nan"),
        (onnx, "TOLERANCE", 0.0, "differ from the model's by"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            assert export.main(again) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "no").exists()

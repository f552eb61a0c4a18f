"""Saved models, the logits of items, and predictions of files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megabert import hf as pretrained
from megabert.config import OpsConfig
from megabert.distributed.ranks import World, discover
from megabert.finetune import datasets, encoding, heads, huggingface, prediction, save, tasks
from megabert.finetune.batches import collate
from megabert.finetune.run import configure
from megabert.finetune.settings import Settings
from megabert.finetune.tasks import Task
from tests.conftest import ROOT
from tests.helpers import finetune_problem, finetuned
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("saved")
    task = tasks.custom("classify", text=["text"], label="label")
    return save_untrained(base, task, finetune_problem.write_texts(base / "texts.tsv", 50, 1))


def save_untrained(base: Path, task: Task, file: Path) -> Path:
    """`base`, whose `best` is a model of `task` that was never trained."""
    finetune_problem.write_run(base / "run")
    finetuned.save_untrained(base, task, file, max_length=32)
    return base


def test_saved_model_is_loaded(folder: Path) -> None:
    found = save.load(folder, CPU)  # the folder above `best` will do
    assert found.results["step"] == 3 and found.described.labels == ("even", "odd")
    assert found.described.task == tasks.custom("classify", text=["text"], label="label")
    assert found.described.shape == heads.HeadShape("classify", 2) and found.described.max_length == 32
    start = pretrained.load(folder / "run")
    assert found.tokenizer.sha256 == start.tokenizer.sha256
    weights = found.module.encoder.state_dict()
    assert torch.equal(weights["layers.2.qkv.weight"], start.weights["layers.2.qkv.weight"])
    assert not found.module.training


def test_backends_are_this_devices(folder: Path, tmp_path: Path) -> None:
    """That of pre-training, in a model saved before, and in one that is fine-tuned now."""
    shutil.copytree(folder / "best", tmp_path / "best")
    path = tmp_path / "best" / save.DESCRIPTION
    tree = json.loads(path.read_text())
    tree["config"]["ops"]["attention"] = "varlen"
    path.write_text(json.dumps(tree))
    assert huggingface.load(tmp_path).module.encoder.backends.attention.name != "varlen"
    start = pretrained.load(folder / "run")
    named = start.config.model_copy(update={"ops": OpsConfig(attention="varlen")})
    assert configure(named, Settings(max_length=32), 50, 1).ops == OpsConfig()


def test_saving_again_replaces_the_folder(folder: Path, tmp_path: Path) -> None:
    found = save.load(folder, CPU)
    for step in (1, 2):
        save.save(tmp_path / "m", found.described, found.module.state_dict(), found.tokenizer, {"step": step})
    assert save.load(tmp_path / "m", CPU).results == {"step": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize(
    "file, content, word",
    [
        ("task.json", b"", "not a fine-tuned model"),
        ("task.json", b"{}", "does not describe a fine-tuned model"),
        ("task.json", b"\xff", "does not describe a fine-tuned model"),
        ("model.safetensors", b"", "cannot be read|does not hold"),
        ("model.safetensors", b"\x80\x04N.", "does not hold"),
        ("vocab.txt", b"", "tokenizer is missing"),
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nw\n", "is not the tokenizer of this model"),
    ],
)
def test_damaged_folder_is_named(file: str, content: bytes, word: str, folder: Path, tmp_path: Path) -> None:
    for path in (folder / "best").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_bytes(content) if content else (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=word):
        save.load(tmp_path, CPU)


def test_predictions_are_those_of_single_texts(folder: Path, tmp_path: Path) -> None:
    world = discover({})
    count = prediction.predict_file(folder / "best", folder / "texts.tsv", tmp_path / "out.tsv", world)
    assert count == 50
    found = save.load(folder, CPU)
    examples = datasets.read(found.described.task, folder / "texts.tsv", labelled=False)
    items = encoding.encode(found.described.task, examples, found.tokenizer, (), 32)
    want = []
    for item in items:
        with torch.no_grad():
            logits = found.module.logits(**collate([item], found.described.layout).reading())
        want.append(("even", "odd")[int(logits.argmax())])
    lines = (tmp_path / "out.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[-1] for line in lines] == want
    assert set(want) <= {"even", "odd"} and len(want) == 50


def logits_on_ranks(world: World, folder: str, *tokens: int) -> list[list[np.ndarray]]:
    found = save.load(folder, CPU)
    task = found.described.task
    examples = datasets.read(task, Path(folder) / "texts.tsv")
    items = encoding.encode(task, examples, found.tokenizer, ("even", "odd"), 32)
    layout = found.described.layout
    return [prediction.logits_of(found.module, items, layout, world, n) for n in tokens]


@pytest.mark.dist
def test_ranks_share_the_items(folder: Path) -> None:
    """Also where one of them has nothing to do: 8,192 tokens at a time are one group."""
    (alone,) = logits_on_ranks(discover({}), str(folder), 8192)
    for results in run_ranks(2, logits_on_ranks, str(folder), 100, 8192):
        for found in results:
            assert max(np.abs(a - b).max() for a, b in zip(alone, found, strict=True)) < 1e-6


def test_file_without_labels_is_predicted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.tsv").write_text("text\nw1 w2\nw2 w1\n")
    assert prediction.predict_file(folder, tmp_path / "new.tsv", tmp_path / "out", discover({})) == 2
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) == 3 and all(line.split("\t")[-1] in ("even", "odd") for line in lines[1:])
    (tmp_path / "own.tsv").write_text("n\tsaid\nx\tw1 w2\ny\tw2 w1\n")
    own = {"text": ["said"], "identity": "n"}
    assert prediction.predict_file(folder, tmp_path / "own.tsv", tmp_path / "out2", discover({}), **own) == 2
    answers = [line.split("\t")[1] for line in lines[1:]]
    assert (tmp_path / "out2").read_text() == f"index\tprediction\nx\t{answers[0]}\ny\t{answers[1]}\n"


def test_input_file_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    path, content = tmp_path / "new.tsv", "text\nw1 w2\n"
    path.write_text(content)
    (tmp_path / "link.tsv").symlink_to(path)
    for output, scores, message in (
        ("new.tsv", "", "--output .*new.tsv: is named twice"),
        ("link.tsv", "", "--output .*link.tsv"),
        ("out.tsv", "new.tsv", "--scores .*new.tsv"),
        ("out.tsv", "out.tsv", "--scores .*out.tsv"),
    ):
        behind = str(tmp_path / scores) if scores else ""
        with pytest.raises(ValueError, match=message):
            prediction.predict_file(folder, path, tmp_path / output, discover({}), probabilities=behind)
    assert path.read_text() == content and not (tmp_path / "out.tsv").exists()


@pytest.mark.parametrize("kind", ["classify", "tag", "span"])
def test_chunks_write_the_bytes_of_one_pass(kind: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    """50 examples, 8 at a time; a prediction that is stopped writes nothing."""
    if kind == "classify":
        model, file = folder, folder / "texts.tsv"
    elif kind == "tag":
        file = tmp_path / "words.conll"
        file.write_text("".join(f"w{n} O\nw{n % 7} B-x\n\n" for n in range(50)))
        model = save_untrained(tmp_path, tasks.custom("tag", metrics=["f1"]), file)
    else:
        file = finetune_problem.write_questions(tmp_path / "questions.json", 50, 1)
        model = save_untrained(tmp_path, tasks.preset("squad2.0"), file)
    one, other = (tmp_path / f"{name}.json" for name in ("one", "other"))

    def predict(output: Path, **options: Any) -> int | None:
        lines = str(output.with_suffix(".jsonl"))
        return prediction.predict_file(model, file, output, discover({}), probabilities=lines, **options)

    assert predict(one) == 50
    monkeypatch.setattr(prediction, "CHUNK", 8)
    answers = iter([False, True])
    assert predict(other, stopped=lambda: next(answers)) is None
    assert not list(tmp_path.glob("*other*")) and not list(tmp_path.glob(".*"))
    assert predict(other) == 50
    first, second = (
        [json.loads(line) for line in p.with_suffix(".jsonl").read_text().splitlines()] for p in (one, other)
    )
    assert [line["prediction"] for line in first] == [line["prediction"] for line in second] and len(first) == 50
    assert one.read_bytes() == other.read_bytes()
    if kind == "span":
        beside = [path.with_name(f"{path.stem}.no_answer.json") for path in (one, other)]
        assert json.loads(beside[0].read_text()) == pytest.approx(json.loads(beside[1].read_text()), abs=1e-5)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(folder: Path, tmp_path: Path) -> None:
    """Ten times the texts, 12 MB of them, take less than 8 MB more."""
    program = (
        "import resource, sys\nfrom megabert.finetune.__main__ import main\n"
        "for name in ('small', 'large'):\n"
        "    argv = ['--model', sys.argv[1], '--predict', f'{name}.tsv', '--output', f'{name}.out']\n"
        "    assert main(argv) == 0\n"
        "    print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    line = " ".join(f"w{n % 9}" for n in range(30))
    for name, texts in (("small", 13_000), ("large", 130_000)):
        (tmp_path / f"{name}.tsv").write_text("text\n" + f"{line}\n" * texts)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    before, after = (int(found.split()[1]) * 1024 for found in done.stdout.split("\n") if "peak" in found)
    assert (tmp_path / "large.tsv").stat().st_size > 11e6 and after - before < 8e6
    assert len((tmp_path / "large.out").read_text().splitlines()) == 130_001


def test_duplicate_id_is_named_and_nothing_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.tsv").write_text("n\ttext\nx\tw1 w2\ny\tw2\nx\tw1\n")
    with pytest.raises(ValueError, match=r"line 4: id 'x' was used before, at .*line 2"):
        prediction.predict_file(folder, tmp_path / "new.tsv", tmp_path / "out", discover({}), identity="n")
    assert [path.name for path in tmp_path.iterdir()] == ["new.tsv"]


def test_null_threshold_decides(tmp_path: Path) -> None:
    file = finetune_problem.write_questions(tmp_path / "questions.json", 20, 1)
    base = save_untrained(tmp_path, tasks.preset("squad2.0"), file)
    empty = []
    for number, threshold in enumerate((0.0, 1.0)):
        output = tmp_path / f"{number}.json"
        assert prediction.predict_file(base, file, output, discover({}), threshold) == 20
        empty.append(sum(not answer for answer in json.loads(output.read_text()).values()))
    assert empty == [20, 0]
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"--null-threshold .*: is a probability, 0 to 1"):
            prediction.predict_file(base, file, tmp_path / "no.json", discover({}), wrong)
    assert not (tmp_path / "no.json").exists()


def test_a_description_is_json_of_its_own(folder: Path) -> None:
    tree = json.loads((folder / "best" / "task.json").read_text())
    assert tree["task"]["kind"] == "classify" and tree["labels"] == ["even", "odd"]


@pytest.mark.parametrize("kind", ["classify", "multilabel", "choose"])
def test_probabilities_of_texts(kind: str, tmp_path: Path) -> None:
    labels = {"multilabel": ["a,b", "a", ""], "choose": ["0", "1", "0"]}.get(kind, "xyx")
    rows = [f"{t}\t{u}\t{y}" for t, u, y in zip(("w1 w2", "w3", "w4"), ("w5", "w6 w7", "w8"), labels, strict=True)]
    path = tmp_path / "t.tsv"
    path.write_text("\n".join(["t\tu\ty", *rows]) + "\n")
    choices = ["u", "t"] if kind == "choose" else []
    base = save_untrained(tmp_path, tasks.custom(kind, ["t"], "y", choices=choices), path)  # type: ignore[arg-type]
    output, lines = tmp_path / "out.tsv", tmp_path / "new" / "scores.jsonl"
    assert prediction.predict_file(base, path, output, discover({}), probabilities=str(lines)) == 3
    head, *written = output.read_text().splitlines()
    assert head == "index\tprediction"
    for row, entry in zip(written, map(json.loads, lines.read_text().splitlines()), strict=True):
        chances = entry["probabilities"]
        assert tuple(chances) == save.load(base, CPU).described.labels
        if kind == "multilabel":
            assert entry["prediction"] == [label for label, p in chances.items() if p > 0.5]
            assert row.split("\t")[1] == ",".join(entry["prediction"])
        else:
            assert entry["prediction"] == row.split("\t")[1] == max(chances, key=lambda label: chances[label])
            assert sum(chances.values()) == pytest.approx(1)


def test_probabilities_of_tags_and_answers(tmp_path: Path) -> None:
    (tmp_path / "t.conll").write_text("w1 O\nw2 B-A\n\nw3 O\n")
    (tmp_path / "tags").mkdir()
    (tmp_path / "spans").mkdir()
    tagger = save_untrained(tmp_path / "tags", tasks.custom("tag"), tmp_path / "t.conll")
    lines = tmp_path / "scores.jsonl"
    prediction.predict_file(
        tagger, tmp_path / "t.conll", tmp_path / "out.conll", discover({}), probabilities=str(lines)
    )
    first, second = map(json.loads, lines.read_text().splitlines())
    assert first["words"] == ["w1", "w2"] and second["words"] == ["w3"]
    tags = [line.split(" ")[-1] for line in (tmp_path / "out.conll").read_text().split("\n") if line]
    for tag, chances in zip(tags, first["probabilities"] + second["probabilities"], strict=True):
        assert sum(chances.values()) == pytest.approx(1) and tag == max(chances, key=lambda label: chances[label])
    path = finetune_problem.write_questions(tmp_path / "q.json", 2, 1)
    reader = save_untrained(tmp_path / "spans", tasks.preset("squad1.1"), path)
    prediction.predict_file(reader, path, tmp_path / "out.json", discover({}), probabilities=str(lines))
    answers = json.loads((tmp_path / "out.json").read_text())
    for line in map(json.loads, lines.read_text().splitlines()):
        assert answers[line["id"]] == line["prediction"] == line["n_best"][0]["text"]
        assert 0 <= line["no_answer_probability"] <= 1

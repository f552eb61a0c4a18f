from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megabert import hf as pretrained
from megabert.config import OpsConfig
from megabert.distributed.process_group import World, discover
from megabert.finetune import datasets, encoding, heads, huggingface, prediction, save, tasks, training
from megabert.finetune.batches import collate
from megabert.finetune.run import configure
from megabert.finetune.tasks import Task
from megabert.finetune.training import Data, Settings, Split
from tests.conftest import ROOT
from tests.helpers import finetune_problem
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def save_untrained(base: Path, task: Task, file: Path) -> Path:
    """`base/best`, a model of `task` that was never trained; gives `base`."""
    finetune_problem.write_run(base / "run")
    start = pretrained.load(base / "run")
    examples = datasets.read(task, file)
    labels = encoding.labels_of(task, examples)
    items = encoding.encode(task, examples, start.tokenizer, labels, 32)
    data = Data(task, labels, {"train": Split(examples, items)})
    settings = Settings(max_length=32, precision="fp32")
    described = training.describe(data, start, settings, 1)
    torch.manual_seed(1)
    module = heads.build(described.config, described.shape, start.weights, CPU, torch.float32)
    save.save(base / "best", described, module.state_dict(), start.tokenizer, {"step": 3})
    return base


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("saved")
    task = tasks.custom("classify", text=["text"], label="label")
    return save_untrained(base, task, finetune_problem.write_texts(base / "texts.tsv", 50, 1))


def test_what_was_saved_is_what_is_loaded(folder: Path) -> None:
    found = save.load(folder, CPU)  # the folder above `best` will do
    assert found.results == {"step": 3} and found.described.labels == ("even", "odd")
    assert found.described.task == tasks.custom("classify", text=["text"], label="label")
    assert found.described.shape == heads.Shape("classify", 2) and found.described.max_length == 32
    start = pretrained.load(folder / "run")
    assert found.tokenizer.sha256 == start.tokenizer.sha256
    weights = found.module.encoder.state_dict()
    assert torch.equal(weights["layers.2.qkv.weight"], start.weights["layers.2.qkv.weight"])
    assert not found.module.training


def test_a_backend_that_this_device_has_not_stays_behind(folder: Path, tmp_path: Path) -> None:
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
        ("task.json", b"", "is no fine-tuned model"),
        ("task.json", b"{}", "describes no fine-tuned model"),
        ("task.json", b"\xff", "describes no fine-tuned model"),
        ("model.safetensors", b"", "cannot be read|does not hold"),
        ("model.safetensors", b"\x80\x04N.", "does not hold"),
        ("vocab.txt", b"", "tokenizer is missing"),
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nw\n", "is not the tokenizer of this model"),
    ],
)
def test_a_damaged_folder_is_named(file: str, content: bytes, word: str, folder: Path, tmp_path: Path) -> None:
    for path in (folder / "best").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_bytes(content) if content else (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=word):
        save.load(tmp_path, CPU)


def test_predictions_are_those_of_each_text_alone(folder: Path, tmp_path: Path) -> None:
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


def test_a_file_without_labels_is_predicted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.tsv").write_text("text\nw1 w2\nw2 w1\n")
    assert prediction.predict_file(folder, tmp_path / "new.tsv", tmp_path / "out", discover({})) == 2
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) == 3 and all(line.split("\t")[-1] in ("even", "odd") for line in lines[1:])
    (tmp_path / "own.tsv").write_text("n\tsaid\nx\tw1 w2\ny\tw2 w1\n")
    own = {"text": ["said"], "identity": "n"}
    assert prediction.predict_file(folder, tmp_path / "own.tsv", tmp_path / "out2", discover({}), **own) == 2
    answers = [line.split("\t")[1] for line in lines[1:]]
    assert (tmp_path / "out2").read_text() == f"index\tprediction\nx\t{answers[0]}\ny\t{answers[1]}\n"


def test_a_file_that_is_read_is_not_written(folder: Path, tmp_path: Path) -> None:
    path, content = tmp_path / "new.tsv", "text\nw1 w2\n"
    path.write_text(content)
    (tmp_path / "link.tsv").symlink_to(path)
    for output, scores, said in (
        ("new.tsv", "", "--output .*new.tsv: is named twice"),
        ("link.tsv", "", "--output .*link.tsv"),
        ("out.tsv", "new.tsv", "--scores .*new.tsv"),
        ("out.tsv", "out.tsv", "--scores .*out.tsv"),
    ):
        behind = str(tmp_path / scores) if scores else ""
        with pytest.raises(ValueError, match=said):
            prediction.predict_file(folder, path, tmp_path / output, discover({}), scores=behind)
    assert path.read_text() == content and not (tmp_path / "out.tsv").exists()


@pytest.mark.parametrize("kind", ["classify", "tag", "span"])
def test_a_prediction_that_was_stopped_goes_on_to_the_same_bytes(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 examples, 8 at a time, stopped behind the second time and again behind the next."""
    if kind == "classify":
        model, file = folder, folder / "texts.tsv"
    elif kind == "tag":
        file = tmp_path / "words.conll"
        file.write_text("".join(f"w{n} O\nw{n % 7} B-x\n\n" for n in range(50)))
        model = save_untrained(tmp_path, tasks.custom("tag", metrics=["f1"]), file)
    else:
        file = finetune_problem.write_questions(tmp_path / "questions.json", 50, 1)
        model = save_untrained(tmp_path, tasks.preset("squad2.0"), file)
    monkeypatch.setattr(prediction, "CHUNK", 8)
    world, (whole, output) = discover({}), (tmp_path / f"{name}.json" for name in ("whole", "output"))
    scores = [path.with_suffix(".jsonl") for path in (whole, output)]
    assert prediction.predict_file(model, file, whole, world, scores=str(scores[0])) == 50
    encoded: list[int] = []
    encode = encoding.encode

    def counted(task: Task, examples: list, *more: Any, **named: Any) -> Any:
        encoded.append(len(examples))
        return encode(task, examples, *more, **named)

    monkeypatch.setattr(encoding, "encode", counted)
    for chunks in (2, 1):
        answers = iter([False] * (chunks - 1) + [True])
        assert (
            prediction.predict_file(model, file, output, world, scores=str(scores[1]), stopped=partial(next, answers))
            is None
        )
        assert not output.exists()
    encoded.clear()
    assert prediction.predict_file(model, file, output, world, scores=str(scores[1])) == 50
    assert sum(encoded) == 50 - 3 * 8 and output.read_bytes() == whole.read_bytes()
    assert scores[0].read_bytes() == scores[1].read_bytes()
    assert len(scores[0].read_text().splitlines()) == 50
    if kind == "span":
        beside = [path.with_name(f"{path.stem}.no_answer.json") for path in (whole, output)]
        assert beside[0].read_bytes() == beside[1].read_bytes() and json.loads(beside[0].read_text())
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file_that_is_predicted(folder: Path, tmp_path: Path) -> None:
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


def test_an_id_that_is_there_twice_is_named_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.tsv").write_text("n\ttext\nx\tw1 w2\ny\tw2\nx\tw1\n")
    with pytest.raises(ValueError, match=r"line 4: id 'x' was there before, at .*line 2"):
        prediction.predict_file(folder, tmp_path / "new.tsv", tmp_path / "out", discover({}), identity="n")
    assert [path.name for path in tmp_path.iterdir()] == ["new.tsv"]


def test_the_threshold_decides_what_has_no_answer(tmp_path: Path) -> None:
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

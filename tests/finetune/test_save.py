from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megabert import pretrained
from megabert.distributed.process_group import World, discover
from megabert.finetune import datasets, encoding, heads, prediction, save, tasks, training
from megabert.finetune.batches import collate
from megabert.finetune.tasks import Task
from megabert.finetune.training import Data, Settings, Split
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
def test_a_damaged_folder_is_named(
    file: str, content: bytes, word: str, folder: Path, tmp_path: Path
) -> None:
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

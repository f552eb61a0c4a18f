"""The command line of fine-tuning: mistakes in one line, options that describe a task, the runs that it asks for."""

import re
from pathlib import Path

import pytest

from megabert import hf as pretrained
from megabert.finetune import files, glue, run
from megabert.finetune.__main__ import main, parse, parse_task
from megabert.finetune.settings import Settings, list_runs
from megabert.finetune.tasks import custom
from tests.helpers import finetune_problem
from tests.helpers.refusal import refusal

pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    finetune_problem.write_run(folder / "run")
    for name, seed in (("train", 1), ("dev", 2), ("test", 3)):
        finetune_problem.write_texts(folder / f"{name}.tsv", 24, seed)
        finetune_problem.write_tags(folder / f"{name}.conll", 24, seed)
    (folder / "unseen.tsv").write_text("label\ttext\nneither\tw1 w2\n")
    return folder


def arguments(base: Path, output: Path, **changes: str) -> list[str]:
    options = {
        "model": "run", "train": "train.tsv", "dev": "dev.tsv", "kind": "classify", "text": "text",
        "label": "label", "output": str(output), "max_length": "32", "batch": "8", "epochs": "1",
    } | changes  # fmt: skip
    paths, given = ("model", "train", "dev", "test", "predict"), []
    for name, value in options.items():
        words = [str(base / value)] if name in paths else value.split()
        given += [f"--{name.replace('_', '-')}", *words] if value else []
    return given


# nothing but a file to predict for
PREDICT = dict.fromkeys(("train", "dev", "kind", "text", "label", "max_length", "batch", "epochs"), "")
PREDICT |= {"predict": "dev.tsv"}
OF_TAGS = {"kind": "tag", "text": "", "label": "", "train": "train.conll", "dev": "dev.conll"}


@pytest.mark.parametrize("changes, word", [
    ({"dev": "unseen.tsv"}, "unseen.tsv"),
    (OF_TAGS | {"threshold": "f1"}, "--threshold f1"),
    ({"max_length": "512"}, "--max-length 512: the model has 32 positions"),
    ({"batch": "9", "micro_batch": "2"}, "--micro-batch 2"),
    ({"layers": "3,4"}, "--layers 3,4: is for --freeze"),
    ({"layers": "3,4+1"}, "--layers 3,4\\+1: expected last, N"),
    ({"layers": "3,5", "freeze": " "}, "--layers 3,5: the model has 0 .embeddings. to 4"),
    ({"predict": "dev.tsv"}, "--kind: is for training"),
])  # fmt: skip
def test_mistake_is_one_line_and_writes_nothing(changes, word, base, tmp_path, capsys) -> None:
    said = refusal(capsys, main, *arguments(base, tmp_path / "out", **changes))
    assert re.search(word, said) and not (tmp_path / "out").exists(), said


def test_existing_predictions_are_not_replaced(base, tmp_path, capsys) -> None:
    (tmp_path / "out").write_text("mine")
    said = refusal(capsys, main, *arguments(base, tmp_path / "out", **PREDICT))
    assert f"--output {tmp_path / 'out'}: already exists; name another file" in said
    assert (tmp_path / "out").read_text() == "mine"


def test_labels_and_ids_can_be_named(base, tmp_path) -> None:
    described = parse_task(parse(arguments(base, tmp_path, labels="odd even", id="number", metric="f1")))
    assert described == custom("classify", ["text"], "label", ["f1"], id="number", labels=["odd", "even"])
    preset = parse_task(parse(arguments(base, tmp_path, kind="", text="", task="sst2", labels="bad good", id="n")))
    assert (preset.labels, preset.id, preset.label) == (("bad", "good"), "n", "label")


def test_limit_keeps_the_labels_of_the_file(base, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    (tmp_path / "sorted.tsv").write_text("label\ttext\n" + "even\tw2 w4\n" * 9 + "odd\tw1 w3\n" * 9)
    task = custom("classify", ["text"], "label", ["accuracy", "f1"])
    paths = {"train": tmp_path / "sorted.tsv", "dev": base / "dev.tsv"}
    splits = {name: files.read(task, path) for name, path in paths.items()}
    tokenizer = pretrained.load(base / "run").tokenizer
    found = run.encode_splits(task, splits, tokenizer, Settings(max_length=32, stride=8), limit=4)
    assert found.labels == ("even", "odd")
    assert caplog.messages == ["labels: even, odd (f1 of odd; --labels names another order)"]
    assert {name: len(part) for name, part in found.examples.items()} == {"train": 4, "dev": 4}


def runs(*argv: str) -> dict[str, Settings]:
    return list_runs(parse(["--model", "", "--output", "", *argv]), 32, 8)


def test_runs_are_every_rate_and_seed() -> None:
    found = runs("--lr", "2e-5", "3e-5", "--seeds", "2", "--epochs", "4")
    assert list(found) == ["lr2e-05-seed1", "lr2e-05-seed2", "lr3e-05-seed1", "lr3e-05-seed2"]
    assert found["lr3e-05-seed2"] == Settings(epochs=4, lr=3e-5, seed=2, max_length=32, stride=8)
    assert runs("--max-length", "16") == {"seed1": Settings(max_length=16, stride=8)}
    assert list(runs("--seeds", "7", "9")) == ["seed7", "seed9"]
    assert [each.lr for each in runs("--freeze", "--layers", "1,2").values()] == [1e-2]
    one = parse(["--model", "", "--output", ""])
    swept = glue.parse(["--model", "", "--data", "", "--output", "", "--seeds", "1"])
    for width, rates in ((256, (3e-4, 1e-3, 1e-4, 5e-5)), (768, (5e-5, 4e-5, 3e-5, 2e-5))):
        assert [each.lr for each in list_runs(one, 32, 8, width).values()] == [rates[0]]
        assert list(list_runs(swept, 32, 8, width)) == [f"lr{rate}-seed1" for rate in rates]


def test_option_out_of_range_is_named() -> None:
    for option in (
        *("--seeds 0", "--seeds 1 1", "--seeds -1", "--lr 0", "--lr 1e-05 1e-05", "--batch 0", "--dropout 1"),
        *("--max-length 7", "--limit -1", "--log-interval 0", "--seeds 20181011", f"--seeds {10**20}"),
        f"--seeds 1 {2**63}",
    ):
        with pytest.raises(ValueError, match=f"^{option}"):
            runs(*option.split())

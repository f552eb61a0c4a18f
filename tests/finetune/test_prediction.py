"""Saved models, the logits of items, and predictions of files."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

from megabert import hf as pretrained
from megabert.common.tables import rows
from megabert.config import OpsConfig, replace
from megabert.distributed.ranks import World, discover
from megabert.finetune import files, huggingface, prediction, save, tasks
from megabert.finetune.run import configure
from megabert.finetune.settings import Settings
from megabert.finetune.tasks import Task
from tests.helpers import finetune_problem, finetuned
from tests.helpers.ranks import run_ranks
from tests.integration.conftest import command

CPU, TEXT = torch.device("cpu"), tasks.custom("classify", text=["text"], label="label")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("saved")
    return save_untrained(base, TEXT, finetune_problem.write_texts(base / "texts.tsv", 50, 1))


def save_untrained(base: Path, task: Task, file: Path) -> Path:
    """`base`, whose `best` is a model of `task` that was never trained."""
    finetune_problem.write_run(base / "run")
    finetuned.save_untrained(base, task, file, max_length=32)
    return base


def test_saved_model_is_loaded_and_replaced(folder: Path, tmp_path: Path) -> None:
    found = save.load(folder, CPU)  # the folder above `best` will do
    assert found.results["step"] == 3 and found.described.labels == ("even", "odd")
    assert found.described.task == TEXT and found.described.outputs == 2 and found.described.max_length == 32
    start = pretrained.load(folder / "run")
    assert found.tokenizer.sha256 == start.tokenizer.sha256
    weights = found.module.encoder.state_dict()
    assert torch.equal(weights["layers.2.qkv.weight"], start.weights["layers.2.qkv.weight"])
    assert not found.module.training
    for step in (1, 2):
        save.save(tmp_path / "m", found.described, found.module.state_dict(), found.tokenizer, {"step": step})
    assert save.load(tmp_path / "m", CPU).results == {"step": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_backends_are_this_devices(folder: Path, tmp_path: Path) -> None:
    """That of pre-training, in a model saved before, and in one that is fine-tuned now."""
    shutil.copytree(folder / "best", tmp_path / "best")
    path = tmp_path / "best" / save.DESCRIPTION
    tree = json.loads(path.read_text())
    tree["config"]["ops"]["attention"] = "varlen"
    path.write_text(json.dumps(tree))
    assert huggingface.load(tmp_path).module.encoder.backends.attention.name != "varlen"
    start = pretrained.load(folder / "run")
    named = replace(start.config, "ops", OpsConfig(attention="varlen"))
    assert configure(named, Settings(max_length=32), 50, 1).ops == OpsConfig()


@pytest.mark.parametrize("file, content, word", [
    ("task.json", b"", "not a fine-tuned model"),
    ("task.json", b"{}", "does not describe a fine-tuned model"),
    ("task.json", b"\xff", "does not describe a fine-tuned model"),
    ("model.safetensors", b"", "cannot be read|does not hold"),
    ("model.safetensors", b"\x80\x04N.", "does not hold"),
    ("vocab.txt", b"", "tokenizer is missing"),
    ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nw\n", "is not the tokenizer of this model"),
])  # fmt: skip
def test_damaged_folder_is_named(file: str, content: bytes, word: str, folder: Path, tmp_path: Path) -> None:
    for path in (folder / "best").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_bytes(content) if content else (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=word):
        save.load(tmp_path, CPU)


def logits_on_ranks(world: World, folder: str, *tokens: int) -> list[list[np.ndarray]]:
    found = save.load(folder, CPU)
    items = found.items(TEXT, files.read(TEXT, Path(folder) / "texts.tsv"))
    return [prediction.compute_logits(found.module, items, found.described.layout, world, n) for n in tokens]


@pytest.mark.dist
def test_ranks_share_the_items(folder: Path) -> None:
    """Also where one of them has nothing to do: 8,192 tokens at a time are one group."""
    (alone,) = logits_on_ranks(discover({}), str(folder), 8192)
    for results in run_ranks(2, logits_on_ranks, str(folder), 100, 8192):
        for found in results:
            assert max(np.abs(a - b).max() for a, b in zip(alone, found, strict=True)) < 1e-6


def test_file_to_predict_may_have_its_own_columns(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.tsv").write_text("text\nw1 w2\nw2 w1\n")
    assert prediction.predict_file(folder, tmp_path / "new.tsv", tmp_path / "out") == 2
    _, *answers = [line.split("\t")[1] for line in (tmp_path / "out").read_text().splitlines()]
    (tmp_path / "own.tsv").write_text("n\tsaid\nx\tw1 w2\ny\tw2 w1\n")
    assert prediction.predict_file(folder, tmp_path / "own.tsv", tmp_path / "out", ["said"], "n") == 2
    assert (tmp_path / "out").read_text() == f"index\tprediction\nx\t{answers[0]}\ny\t{answers[1]}\n"
    (tmp_path / "lines.txt").write_text("w1 w2\n\nw2 w1\n")
    prediction.predict_file(folder, tmp_path / "lines.txt", tmp_path / "out", lines=True)
    assert (tmp_path / "out").read_text() == f"index\tprediction\n0\t{answers[0]}\n1\t{answers[1]}\n"
    (tmp_path / "twice.tsv").write_text("n\ttext\nx\tw1 w2\ny\tw2\nx\tw1\n")
    with pytest.raises(ValueError, match=r"line 4: id 'x' was used before, at .*line 2"):
        prediction.predict_file(folder, tmp_path / "twice.tsv", tmp_path / "none", identity="n")
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob(".*"))


def test_ranking_predicts_every_text(tmp_path: Path, caplog) -> None:
    """Also the negatives, with the numbers that they have in training; long ones are counted."""
    file, task = tmp_path / "r.jsonl", tasks.preset("ranking")
    lines = ({"query": "w1", "positives": ["w2"], "negatives": ["w3 " * 40, "w4"]} for _ in range(2))
    file.write_text("\n".join(map(json.dumps, lines)))
    save_untrained(tmp_path, task, file)
    assert "the train file: 2 of 6 texts are longer than 32 tokens and lost their end" in caplog.text
    caplog.clear()
    assert prediction.predict_file(tmp_path, file, tmp_path / "out") == 6 == len(files.read(task, file))
    assert caplog.messages == [
        f"{file}: 2 of 6 texts are longer than 32 tokens and lost their end; "
        "a larger --max-length in training keeps it, if the model takes as many"
    ]


def test_ids_of_training_are_kept_where_there_are(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.tsv"
    file.write_text("pid\ttext\tlabel\nA7\tw1 w2\teven\nB9\tw2 w1\todd\n")
    save_untrained(tmp_path, tasks.custom("classify", ["text"], "label", id="pid"), file)
    found = {}
    for name, content in {"ids": "text\tpid\nw1\tC1\nw2\tC2\n", "none": "text\nw1\nw2\n", "lines": "w1\nw2\n"}.items():
        (tmp_path / f"{name}.tsv").write_text(content)
        prediction.predict_file(tmp_path, tmp_path / f"{name}.tsv", tmp_path / "out", lines=name == "lines")
        found[name] = [line.split("\t")[0] for line in (tmp_path / "out").read_text().splitlines()[1:]]
    assert found == {"ids": ["C1", "C2"], "none": ["0", "1"], "lines": ["0", "1"]}
    (tmp_path / "plain.tsv").write_text("w1\tx\nw2\ty\n")
    prediction.predict_file(tmp_path, tmp_path / "plain.tsv", tmp_path / "out", text=["0"])  # a column by its number
    assert [line.split("\t")[0] for line in (tmp_path / "out").read_text().splitlines()[1:]] == ["0", "1"]


def test_model_is_found_in_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    """Laid out as the hub's library does, which is told to stay offline; a name that is not there is one line."""
    cache = tmp_path / "hub/models--some--tuned"
    for part in ("blobs", "refs", "snapshots/c0ffee"):
        (cache / part).mkdir(parents=True)
    (cache / "refs/main").write_text("c0ffee")
    for path in (folder / "best").iterdir():
        (cache / "blobs" / path.name).write_bytes(path.read_bytes())
        (cache / "snapshots/c0ffee" / path.name).symlink_to(f"../../blobs/{path.name}")
    output = tmp_path / "out.tsv"

    def predict(name: str) -> Any:
        given = ("--model", name, "--predict", str(folder / "texts.tsv"), "--output", str(output))
        return command("-m", "megabert.finetune", *given, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))

    missing = predict("some/tunde")
    (unknown,) = missing.stderr.splitlines()
    assert missing.returncode == 4 and unknown.startswith(
        "error: some/tunde: no such folder, and the hub cannot be reached to look for a model of that name ("
    )
    assert "offline mode is enabled" in unknown
    done = predict("some/tuned")
    assert done.returncode == 0, done.stderr
    prediction.predict_file(folder, folder / "texts.tsv", tmp_path / "want.tsv")
    assert output.read_bytes() == (tmp_path / "want.tsv").read_bytes()


def test_mistakes_of_a_prediction_are_named(folder: Path, tmp_path: Path, monkeypatch) -> None:
    path, content = tmp_path / "new.tsv", "text\nw1 w2\n"
    path.write_text(content)
    (tmp_path / "link.tsv").symlink_to(path)
    for output in ("new.tsv", "link.tsv"):
        with pytest.raises(ValueError, match=f"--output .*{output}: the file to predict for"):
            prediction.predict_file(folder, path, tmp_path / output)
    assert path.read_text() == content
    with pytest.raises(ValueError, match=f"--output {tmp_path}: is a folder; name a file"):
        prediction.predict_file(folder, path, tmp_path)
    with pytest.raises(ValueError, match="--text: names 2 columns, and custom reads 1"):
        prediction.predict_file(folder, path, tmp_path / "out", ["text", "text"])
    with pytest.raises(ValueError, match=r"--lines is of one text each, and squad2\.0 reads two"):
        list(files.stream(tasks.preset("squad2.0"), path, labelled=False, lines=True))
    tags = finetune_problem.write_tags(tmp_path / "tags.conll", 10, 1)
    tagger = save_untrained(tmp_path, tasks.custom("tag"), tags)
    with pytest.raises(ValueError, match="--probabilities: are of the labels of a text"):
        prediction.predict_file(tagger, tags, tmp_path / "out", probabilities=True)
    assert not (tmp_path / "out").exists()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="one process predicts, 2 were started"):
        prediction.predict_file(folder, path, tmp_path / "out")


@pytest.mark.parametrize("kind", ["classify", "multilabel"])
def test_probabilities_are_those_of_the_logits(kind: str, folder: Path, tmp_path: Path) -> None:
    """In a column of each label, which the predictions agree with."""
    if kind == "classify":
        model, file = folder, folder / "texts.tsv"
    else:
        file = finetune_problem.write_label_sets(tmp_path / "texts.tsv", 50, 1)
        model = save_untrained(tmp_path, tasks.custom(kind, ["text"], "label"), file)
    assert prediction.predict_file(model, file, tmp_path / "out.tsv", probabilities=True) == 50
    found = save.load(model, CPU)
    task, labels = found.described.task, found.described.labels
    assert (tmp_path / "out.tsv").read_text().splitlines()[0].split("\t") == ["index", "prediction", *labels]
    items = found.items(task, files.read(task, file))
    logits = prediction.compute_logits(found.module, items, found.described.layout, discover({}))
    for (_, (shown, *given)), values in zip(rows(tmp_path / "out.tsv", ["prediction", *labels]), logits, strict=True):
        shares = list(map(float, given))
        assert shares == pytest.approx((special.softmax if kind == "classify" else special.expit)(values), abs=2e-5)
        if kind == "classify":
            assert shown == labels[int(shares[1] > 0.5)]
        else:
            assert shown == ",".join(name for name, share in zip(labels, shares, strict=True) if share > 0.5)


@pytest.mark.parametrize("kind", ["classify", "span"])
def test_chunks_write_the_bytes_of_one_pass(kind: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    if kind == "classify":
        model, file = folder, folder / "texts.tsv"
    else:
        file = finetune_problem.write_questions(tmp_path / "questions.json", 50, 1)
        model = save_untrained(tmp_path, tasks.preset("squad2.0"), file)
    one, other = (tmp_path / f"{name}.json" for name in ("one", "other"))
    assert prediction.predict_file(model, file, one) == 50
    monkeypatch.setattr(prediction, "CHUNK", 8)
    assert prediction.predict_file(model, file, other) == 50
    assert one.read_bytes() == other.read_bytes()
    if kind == "span":
        beside = [path.with_name(f"{path.stem}.no_answer.json") for path in (one, other)]
        assert json.loads(beside[0].read_text()) == pytest.approx(json.loads(beside[1].read_text()), abs=1e-5)
        one.rename(tmp_path / "kept.json")
        with pytest.raises(ValueError, match=r"one\.no_answer\.json: already exists; name another file"):
            prediction.predict_file(model, file, one)
        assert not one.exists()


def peaks_of_predictions(world: World, model: str, folder: str) -> list[int]:
    """Most bytes of memory after the small file's predictions, and after the large one's."""
    found = []
    for name in ("small", "large"):
        prediction.predict_file(model, f"{folder}/{name}.tsv", f"{folder}/{name}.out")
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return found


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(folder: Path, tmp_path: Path) -> None:
    """Ten times the texts, 12 MB of them, take less than 8 MB more."""
    line = " ".join(f"w{n % 9}" for n in range(30))
    for name, texts in (("small", 13_000), ("large", 130_000)):
        (tmp_path / f"{name}.tsv").write_text("text\n" + f"{line}\n" * texts)
    before, after = run_ranks(1, peaks_of_predictions, str(folder), str(tmp_path))[0]
    assert (tmp_path / "large.tsv").stat().st_size > 11e6 and after - before < 8e6
    assert len((tmp_path / "large.out").read_text().splitlines()) == 130_001

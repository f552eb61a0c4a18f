from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pytest

from megabert.common.files import sha256_of
from megabert.finetune import datasets
from megabert.finetune.benchmark import evaluation, suites
from megabert.finetune.tasks import Task
from tests.helpers import glue_folder

TOML = """
kind = "classify"
text = ["review"]
label = "stars"
metrics = ["macro_f1", "accuracy"]
train = "train.tsv"
[settings]
epochs = 5
lr = 3e-4
"""


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    return glue_folder.write_folder(tmp_path_factory.mktemp("suites") / "glue")


def test_glues_own_layout_is_found_whole(glue) -> None:
    found = {entry.name: entry for entry in suites.find("glue", glue)}
    assert list(found) == ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
    assert [entry.title for entry in found.values()] == list(suites.GLUE.values())
    assert {part: path.name for part, path in found["mnli"].dev.items()} == {
        **{"m": "dev_matched.tsv", "mm": "dev_mismatched.tsv"}
    }
    assert list(found["mnli"].test) == ["MNLI-m", "MNLI-mm", "AX"]
    assert list(found["stsb"].test) == ["STS-B"] and list(found["stsb"].dev) == [""]
    for entry in found.values():
        assert len(datasets.read(entry.task, entry.train)) == 20
        assert all(len(datasets.read(entry.task, path)) == 8 for path in entry.dev.values())
        for name, path in entry.test.items():
            meant = datasets.for_prediction(entry.task, path)
            ids = [example.id for example in datasets.read(meant, path, labelled=False)]
            wanted = {"AX": ["0", "1", "2", "3", "4", "5"], "QQP": ["0", "1", "3", "4"]}  # row 2 is cut
            assert ids == wanted.get(name, ["0", "1", "2", "3", "4"]), name


def test_folders_by_the_names_of_tasks_and_packed_files(tmp_path) -> None:
    (tmp_path / "sst2").mkdir()
    with gzip.open(tmp_path / "sst2/train.tsv.gz", "wt") as file:
        file.write("sentence\tlabel\ngood\t1\nbad\t0\n")
    (tmp_path / "squad1.1").mkdir()
    (entry,) = suites.find("glue", tmp_path)
    assert (entry.name, entry.dev, entry.test) == ("sst2", {}, {})
    assert len(datasets.read(entry.task, entry.train)) == 2


def test_squad_is_found_in_the_folder_and_in_one_of_its_own(tmp_path) -> None:
    (tmp_path / "SQuAD").mkdir()
    for name in ("train-v1.1", "dev-v1.1", "train-v2.0"):
        (tmp_path / f"SQuAD/{name}.json").write_text(json.dumps({"data": []}))
    one, two = suites.find("squad", tmp_path)
    assert (one.title, list(one.dev), two.title, two.dev) == ("SQuAD 1.1", [""], "SQuAD 2.0", {})
    assert [e.name for e in suites.find("squad", tmp_path / "SQuAD", ["squad2.0"])] == ["squad2.0"]
    assert one.settings["max_length"] == 384 and two.settings["batch"] == 48 and not one.searched


def test_a_task_of_ones_own_is_a_toml_file(tmp_path) -> None:
    (tmp_path / "train.tsv").write_text("stars\treview\n1\tgood\n")
    (tmp_path / "reviews.toml").write_text(TOML)
    (tmp_path / "polarity.toml").write_text('task = "sst2"\nlabel = "mark"\ntrain = "train.tsv"\n')
    (tmp_path / "names.toml").write_text('kind = "tag"\ntrain = "train.tsv"\ntest = "train.tsv"\n')
    names, polarity, reviews = suites.find("own", tmp_path)
    assert reviews.task == Task("reviews", "classify", ("review",), "stars", metrics=("macro_f1", "accuracy"))
    assert reviews.settings == {"batch": 32, "max_length": 128, "epochs": 5, "lr": 3e-4} and not reviews.searched
    assert (polarity.task.label, polarity.task.labels, polarity.searched) == ("mark", ("0", "1"), True)
    assert (names.task.text, names.task.label, names.test) == (("0",), "-1", {"names": tmp_path / "train.tsv"})


def test_a_task_of_ones_own_like_squad_reads_squads_lengths(tmp_path) -> None:
    (tmp_path / "train.json").write_text(json.dumps({"data": []}))
    for more, want in (("", (384, 128)), ("[settings]\nmax_length = 256\n", (256, 128))):
        (tmp_path / "mine.toml").write_text(f'task = "squad2.0"\ntrain = "train.json"\n{more}')
        (entry,) = suites.find("own", tmp_path)
        assert (entry.settings["max_length"], entry.settings["stride"]) == want


def test_a_task_of_ones_own_may_be_a_saved_dataset(tmp_path) -> None:
    (tmp_path / "train").mkdir()
    feather.write_feather(pa.table({"review": ["a", "b"], "stars": ["1", "2"]}), tmp_path / "train/a.arrow")
    (tmp_path / "train/state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (tmp_path / "reviews.toml").write_text(TOML.replace("train.tsv", "train"))
    (entry,) = suites.find("own", tmp_path)
    assert [e.label for e in datasets.read(entry.task, entry.train)] == ["1", "2"]  # type: ignore[union-attr]
    assert evaluation.files_of(entry) == {"train": sha256_of(tmp_path / "train/a.arrow")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind = ", "is not TOML"),
        (TOML + "epoch = 3", r"no key settings.epoch; known are .*did you mean epochs"),
        (TOML.replace("label", "lable"), r"no key lable; .*did you mean label"),
        (TOML.replace('["review"]', '"review"'), "text = 'review': must be a list of texts"),
        (TOML.replace("= 5", "= true"), "settings.epochs = True: must be a whole number"),
        (TOML.replace("= 5", "= 2.5"), "settings.epochs = 2.5: must be a whole number"),
        (TOML + 'long = "pooled"', "settings.long = 'pooled': is none of truncate, pool"),
        (TOML.replace("train.tsv", "other.tsv"), "train = 'other.tsv': there is no such file"),
        (TOML.replace('train = "train.tsv"', ""), "names no file as train"),
        (TOML.replace('kind = "classify"', ""), "name a known task .* or a kind"),
        (TOML.replace("classify", "cluster"), "kind 'cluster' is none of"),
        (TOML.replace('kind = "classify"', 'task = "sts2"'), "no task 'sts2'"),
    ],
)
def test_a_wrong_toml_file_is_named_with_its_key(text, says, tmp_path) -> None:
    (tmp_path / "train.tsv").write_text("stars\treview\n1\tgood\n")
    (tmp_path / "reviews.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"reviews\.toml: .*{says}"):
        suites.find("own", tmp_path)


def test_what_is_not_there_is_said(glue, tmp_path) -> None:
    for suite, says in (("glue", "train.tsv and dev.tsv"), ("squad", "train-v1.1.json"), ("own", "NAME.toml")):
        with pytest.raises(ValueError, match=f"has no task of --suite {suite}; .*{says}"):
            suites.find(suite, tmp_path)
    with pytest.raises(ValueError, match=r"--tasks ret: is none of cola, .*; did you mean rte"):
        suites.find("glue", glue, ["ret"])
    (tmp_path / "RTE").mkdir()
    with pytest.raises(ValueError, match=r"RTE: has no train\.tsv"):
        suites.find("glue", tmp_path)
    (tmp_path / "rte").mkdir()
    with pytest.raises(ValueError, match="holds RTE twice, RTE and rte"):
        suites.find("glue", tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        suites.find("glue", tmp_path / "absent")

"""Nested and joined text fields in JSON lines and tables, and the split of a saved dataset that is read."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from data_prep.common.errors import BadInput
from data_prep.common.records import FileRange, ReadTask
from data_prep.readers import formats
from data_prep.readers.tasks import unpacked_bytes
from tests.helpers.prep_reading import plan, read_all

RECORDS = [
    {"title": "A title", "inner": {"body": "One body."}, "a+b": "spelt so"},
    {"title": None, "inner": {"body": "Body alone."}, "a+b": None},
    {"title": "Title alone", "inner": None, "a+b": None},
    {"title": None, "inner": {"body": None}, "a+b": None},
]
CASES = {
    "inner.body": (["One body.", "Body alone."], 2),
    "title+inner.body": (["A title\n\nOne body.", "Body alone.", "Title alone"], 1),
    "a+b": (["spelt so"], 3),
}


@pytest.fixture(params=["jsonl", "parquet", "arrow"])
def table(request, tmp_path):
    path = tmp_path / f"t.{request.param}"
    if request.param == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    elif request.param == "parquet":
        parquet.write_table(pa.Table.from_pylist(RECORDS), path)
    else:
        found = pa.Table.from_pylist(RECORDS)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, found.schema) as out:
            out.write_table(found)
    return path


@pytest.mark.parametrize("field", CASES)
def test_fields_inside_others_and_joined(table, field):
    texts, problems = read_all([table], text_field=field)
    assert (texts, problems.dropped[formats.NULL]) == CASES[field]


@pytest.mark.parametrize("field", ["inner.text", "title+inner.text", "title.text", "inner"])
def test_a_field_that_is_not_there_is_named(table, field):
    name = field.split("+")[-1]
    with pytest.raises(BadInput, match=rf"(field|column) '{name}'"):
        read_all([table], text_field=field)


def save(folder, text):
    """A dataset as Hugging Face `datasets` saves it, of one record."""
    folder.mkdir(parents=True)
    found = pa.Table.from_pylist([{"text": text}])
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, found.schema) as out:  # fmt: skip
        out.write_table(found)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


def test_of_a_saved_dictionary_one_split_is_read(tmp_path):
    for split in ("train", "test"):
        save(tmp_path / "d" / split, f"{split} text")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    texts, problems = read_all([tmp_path / "d"])
    assert texts == ["train text"] and problems.counts["split not read"] == 1
    assert read_all([tmp_path / "d"], split="test")[0] == ["test text"]
    assert read_all([tmp_path / "d"], split="all")[0] == ["test text", "train text"]
    assert read_all([tmp_path / "d" / "test"])[0] == ["test text"]
    with pytest.raises(BadInput, match=r"no split 'dev' \(it has train, test\)"):
        read_all([tmp_path / "d"], split="dev")


def test_of_tables_named_after_splits_one_split_is_read(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        parquet.write_table(pa.Table.from_pylist([{"text": name}]), tmp_path / f"{name}.parquet")
    assert read_all([tmp_path])[0] == ["train-00000-of-00002", "train-00001-of-00002"]
    assert read_all([tmp_path], split="test")[0] == ["test-00000-of-00001"]
    parquet.write_table(pa.Table.from_pylist([{"text": "b"}]), tmp_path / "books-00000-of-00001.parquet")
    assert len(read_all([tmp_path])[0]) == 4  # names of something else


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst", "parquet"])
def test_unpacked_bytes_are_told_from_openings(kind, tmp_path):
    import bz2
    import gzip
    import lzma
    import random

    import zstandard

    rng = random.Random(1)
    text = "\n".join(" ".join(rng.choices(("one", "two", "three", "four"), k=12)) for _ in range(8_000))
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}
    if kind == "parquet":
        rows = pa.Table.from_pylist([{"text": line} for line in text.split("\n")])
        parquet.write_table(rows, tmp_path / "t.parquet", use_dictionary=False)
    else:
        (tmp_path / f"t.txt.{kind}").write_bytes(pack[kind](text.encode()))
    found = plan([tmp_path])
    assert unpacked_bytes(found) == pytest.approx(len(text), rel=0.1)
    assert sum(task.size for task in found) < len(text) / 2


def test_unpacked_bytes_of_plain_files_open_nothing():
    piece = FileRange("no such file", size=900)
    assert unpacked_bytes([ReadTask(0, (piece,)), ReadTask(1, (piece,))]) == 1800

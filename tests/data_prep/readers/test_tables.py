"""Parquet, Arrow and saved datasets; fields inside others."""

import json
import random
import re
from itertools import product

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.common.errors import BadInput, Unfinished
from data_prep.readers import streams, tasks
from data_prep.readers.tasks import unpacked_bytes
from tests.helpers.prep_reading import PACK, plan, read_all, refuse, write, write_table

TEXTS = [f"Row {i} of the table: é {'x' * (i % 40)}." for i in range(3000)]
TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
either = pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])


@pytest.mark.parametrize("name", ["t.parquet", "stream.arrow", "footer.arrow", "t.feather"])
@pytest.mark.parametrize("type_", TYPES, ids=str)
def test_text_column_is_read(name, type_, tmp_path):
    texts = [None if i % 10 == 3 else text for i, text in enumerate(TEXTS)]
    table = pa.table({"id": range(3000), "text": pa.array(texts).cast(type_), "more": ["z"] * 3000})
    for policy in ("stop", "skip"):
        found, problems = read_all([write_table(tmp_path / name, table)], policy)
        assert found == [text for text in texts if text is not None]
        assert problems.dropped == {"null value": 300} and not problems.counts


@either
def test_invalid_utf8_is_named_by_its_row(name, tmp_path):
    column = pa.array([b"good"] * 555 + [b"bad \xff"] + [b"good"] * 44, pa.binary()).view(pa.string())
    path = write_table(tmp_path / name, pa.table({"text": column}))
    found, problems = refuse(path, rf"{name}: row 555: invalid UTF-8")
    assert len(found) == 599 and problems.counts == {"invalid UTF-8": 1}
    assert problems.lost == {"invalid UTF-8": {"bytes": 5, "files": [str(path)]}}


@either
def test_too_long_text_names_its_row(name, tmp_path, monkeypatch):
    """As in every other format; what several columns give together counts."""
    monkeypatch.setattr(streams, "MAX_DOCUMENT", 1 << 20)
    good, half = ["good"] * 5, "x" * (1 << 19)
    path = write_table(tmp_path / name, pa.table({"text": [*good, half, None], "more": [*good, half + "x", half]}))
    assert len(read_all([path])[0]) == 6
    message = rf"{name}: row 5: a text longer than 1 MiB"
    found, problems = refuse(path, message, Unfinished, text_field="text+more")
    assert len(found) == 6 and found[-1] == half and problems.counts == {"long document": 1}
    assert problems.lost["long document"]["bytes"] == (1 << 20) + 1


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "footer.arrow"])
def test_damaged_table_never_passes(name, tmp_path, monkeypatch):
    rng = random.Random(2)
    path = write_table(tmp_path / name, pa.table({"text": TEXTS[:500]}))
    whole = path.read_bytes()
    for share, small in product(
        (0.01, 0.2, 0.5, 0.9, 0.99), (1, tasks.SMALL)
    ):  # a large one is opened when it is listed
        monkeypatch.setattr(tasks, "SMALL", small)
        path.write_bytes(whole[: int(len(whole) * share)])
        _, problems = refuse(path, f"{name}: damaged or truncated table")
        assert problems.counts == {"damaged or truncated file": 1}
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 30))):
            damaged[rng.randrange(6, len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        read_all([path], "skip")
        try:
            read_all([path])
        except BadInput as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)


def test_a_bomb_of_one_repeated_value_is_refused(tmp_path):
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": ["x" * (1 << 20)] * 110}), path, use_dictionary=False, compression="zstd")
    assert path.stat().st_size < 200_000
    with pytest.raises(BadInput, match=r"bomb\.parquet: row group 0 unpacks to more than 200 times"):
        read_all([path])
    columns = {"text": ["a"] * 110, "text_flags": ["x" * (1 << 20)] * 110}  # the other one is not read
    pq.write_table(pa.table(columns), path, use_dictionary=False, compression="zstd")
    assert read_all([path])[0] == ["a"] * 110


def test_saved_dataset_is_its_tables(tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(3000))})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    write_table(tmp_path / "one" / "cache-1f.arrow", pa.table({"text": ["stale"]}))
    assert read_all([tmp_path / "one"])[0] == TEXTS
    both = datasets.DatasetDict({"train": whole.select(range(2000)), "test": whole.select(range(2000, 3000))})
    both.save_to_disk(tmp_path / "two")
    assert read_all([tmp_path / "two" / "train"])[0] == TEXTS[:2000]
    assert read_all([tmp_path / "two"])[0] == TEXTS[2000:] + TEXTS[:2000]


RECORDS = [
    {"title": "A title", "inner": {"body": "One body."}, "a+b": "spelt so", "texts": ["One.", "Two."],
     "list": [{"text": "First.", "n": 1}, {"text": None, "n": 2}, {"text": "Last.", "n": 3}]},
    {"title": None, "inner": {"body": "Body alone."}, "a+b": None, "texts": [], "list": []},
    {"title": "Title alone", "inner": None, "a+b": None, "texts": None, "list": None},
    {"title": None, "inner": {"body": None}, "a+b": None, "texts": ["Alone."], "list": [{"text": "Body.", "n": 4}]},
]  # fmt: skip
FIELDS = {
    "inner.body": ["One body.", "Body alone."],
    "title+inner.body": ["A title\n\nOne body.", "Body alone.", "Title alone"],
    "a+b": ["spelt so"],
    "texts": ["One.\n\nTwo.", "Alone."],
    "list[].text": ["First.\n\nLast.", "Body."],
    "texts+list[].text": ["One.\n\nTwo.\n\nFirst.\n\nLast.", "Alone.\n\nBody."],
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_fields_inside_others_lists_and_joined(kind, tmp_path):
    path = tmp_path / f"t.{kind}"
    if "json" in kind:
        write(path, json.dumps(RECORDS) if kind == "json" else "\n".join(map(json.dumps, RECORDS)))
    else:
        write_table(path, pa.Table.from_pylist(RECORDS))
    for field, want in FIELDS.items():
        texts, problems = read_all([path], text_field=field)
        assert (texts, problems.dropped["null value"]) == (want, 4 - len(want)), field
    for field in ("inner.text", "title+inner.text", "title.text", "inner", "list", "list[].n"):
        with pytest.raises(BadInput, match=rf"(field|column) '{re.escape(field.split('+')[-1])}'"):
            read_all([path], text_field=field)
    _, problems = refuse(path, rf"{path.name}: .*no (field|column) 'text' .*\(it has .*\binner\b.*\)")
    assert set(problems.counts) == {"no text field"}


def test_lists_of_a_batch_are_read_by_slices(tmp_path):
    """Batches are longer than the rows that are converted at once, and lists have other offsets then."""
    texts = [[f"Row {i}."] * (i % 3) for i in range(1000)]
    path = write_table(tmp_path / "a.arrow", pa.table({"text": texts}))
    assert read_all([path])[0] == ["\n\n".join(row) for row in texts if row]


@pytest.mark.parametrize("kind", [*PACK, "parquet"])
def test_unpacked_bytes_are_estimated_from_openings(kind, tmp_path):
    rng = random.Random(1)
    text = "\n".join(" ".join(rng.choices(("one", "two", "three", "four"), k=12)) for _ in range(8_000))
    if kind == "parquet":
        pq.write_table(pa.table({"text": text.split("\n")}), tmp_path / "t.parquet", use_dictionary=False)
    else:
        (tmp_path / f"t.txt.{kind}").write_bytes(PACK[kind](text.encode()))
    found = plan([tmp_path])
    assert unpacked_bytes(found) == pytest.approx(len(text), rel=0.1)
    assert sum(task.size for task in found) < len(text) / 2


@either
def test_two_columns_of_a_name_are_refused(name, tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["text", "text", "n"])
    path = write_table(tmp_path / name, table)
    refuse(path, "two columns 'text'; rename one")
    assert read_all([path], text_field="n")[0] == ["c"]

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from megabert.finetune.benchmark import submission


def predictions(folder: Path, **values: list[str]) -> dict[str, Path]:
    found = {}
    for name, column in values.items():
        path = folder / f"{name.replace('_', '-')}.tsv"
        rows = [f"{i}\t{value}" for i, value in enumerate(column)]
        path.write_text("\n".join(["index\tprediction", *rows]) + "\n")
        found[path.stem] = path
    return found


def test_the_zip_has_glues_names_header_and_values(tmp_path) -> None:
    given = predictions(tmp_path, STS_B=["5.31", "-0.2", "2.71828"], RTE=["entailment"] * 2, AX=["neutral"])
    missing = submission.write_glue(tmp_path / "out", given)
    assert missing == ["CoLA", "SST-2", "MRPC", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "WNLI"]
    with zipfile.ZipFile(tmp_path / "out" / submission.ZIP) as archive:
        assert archive.namelist() == ["STS-B.tsv", "RTE.tsv", "AX.tsv"]
        assert archive.read("STS-B.tsv") == b"index\tprediction\n0\t5.000\n1\t0.000\n2\t2.718\n"
        assert archive.read("RTE.tsv") == b"index\tprediction\n0\tentailment\n1\tentailment\n"
        assert all(info.external_attr >> 16 == 0o644 for info in archive.infolist())
    before = (tmp_path / "out" / submission.ZIP).read_bytes()
    submission.write_glue(tmp_path / "out", given)
    assert (tmp_path / "out" / submission.ZIP).read_bytes() == before


def test_every_index_has_a_line_in_order(capsys) -> None:
    text = submission.glue_table("QQP", "index\tprediction\n3\t1\n0\t1\n2\t0\n")
    assert text == "index\tprediction\n0\t1\n1\t0\n2\t0\n3\t1\n"
    assert "QQP: 1 test rows are cut and get '0': 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="RTE: its test file has no index 1, and GLUE wants all"):
        submission.glue_table("RTE", "index\tprediction\n0\tentailment\n2\tentailment\n")
    with pytest.raises(ValueError, match="index 'a1' of its test file is no number"):
        submission.glue_table("RTE", "index\tprediction\na1\tentailment\n")


def test_nothing_is_written_where_one_file_cannot_be(tmp_path) -> None:
    given = predictions(tmp_path, RTE=["entailment"])
    given["CoLA"] = tmp_path / "CoLA.tsv"
    given["CoLA"].write_text("index\tprediction\n1\t0\n")
    with pytest.raises(ValueError, match="CoLA"):
        submission.write_glue(tmp_path / "out", given)
    assert not (tmp_path / "out").exists()


def test_squads_answers_are_handed_in_as_they_are(tmp_path) -> None:
    for name in ("squad2.0.json", "squad2.0.no_answer.json"):
        (tmp_path / name).write_text(name)
    submission.write_plain(tmp_path / "out", {"squad2.0.json": tmp_path / "squad2.0.json"})
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == {
        name: name for name in ("squad2.0.json", "squad2.0.no_answer.json")
    }

"""Builds without evaluation texts: planted ones are dropped and listed, from any number of workers, and nothing else is."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from data_prep.__main__ import main

OLD = Path(__file__).resolve().parents[1] / "data" / "old_formats"
PLANTED = {
    3: "It 's a charming and often affecting journey .",
    10: "Who was the first person to walk on the surface of the Moon ?",
    20: "The quick response of the town saved the old bridge from the flood that came down in the spring of that year , as all who were there that night have told their children since .",
}


@pytest.fixture
def inputs(tmp_path):
    rng = random.Random(3)
    words = [word for line in (OLD / "text" / "notes.txt").read_text().split("\n") for word in line.split()]
    lines = []
    for i in range(60):
        sentences = [" ".join(rng.sample(words, 12)).capitalize() + "." for _ in range(5)]
        if i in PLANTED:
            sentences.insert(2, PLANTED[i])
        lines.append(" ".join(sentences))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "sst.tsv").write_text(f"label\tcontent\n1\t{PLANTED[3]}\n0\tnot in it\n")
    long = {"paragraphs": [{"context": f"Before it. {PLANTED[20]} After it."}], "qas": [{"question": PLANTED[10]}]}
    (tmp_path / "squad.json").write_text(json.dumps({"data": [long]}))
    return tmp_path


def build(inputs, output, *options):
    return main(
        ["build", "--input", f"{inputs}/text.txt", "--text-documents", "line", "--no-nsp", "--seq-len", "32", "--held-out", "0",
         "--tokenizer", str(OLD / "dataset" / "tokenizer.model"), "--output", str(output), "--quiet", *options]
    )  # fmt: skip


def test_planted_evaluation_texts_are_dropped_and_listed(inputs, tmp_path):
    files = ("--decontaminate", f"{inputs}/sst.tsv", f"{inputs}/squad.json")
    digests = []
    for workers in ("1", "2"):
        assert build(inputs, tmp_path / workers, "--workers", workers, *files) == 0
        paths = sorted(path for path in (tmp_path / workers).rglob("*") if path.is_file())
        digests.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths})
    for part in (["--part", "2/2"], ["--part", "1/2"], ["--merge"]):
        assert build(inputs, tmp_path / "3", "--workers", "1", *files, *part) == 0
    paths = sorted(path for path in (tmp_path / "3").rglob("*") if path.is_file())
    digests.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths})
    assert digests[0] == digests[1] == digests[2]
    report = json.loads((tmp_path / "1" / "report.json").read_text())
    assert report["dropped"]["reasons"] == {"evaluation text": 3}
    listed = [json.loads(line) for line in (tmp_path / "1" / "contaminated.jsonl").read_text().splitlines()]
    assert [entry["evaluation"] for entry in listed] == [f"{inputs}/sst.tsv, line 2"] + [f"{inputs}/squad.json"] * 2
    for entry, number in zip(listed, PLANTED, strict=True):
        assert PLANTED[number][:20] in entry["text"] or number == 20
        assert entry["document"] == " ".join((inputs / "text.txt").read_text().split("\n")[number].split())[:300]


def test_evaluation_files_are_part_of_what_a_build_is_known_by(inputs, tmp_path, capsys):
    assert build(inputs, tmp_path / "out", "--workers", "1") == 0
    assert "decontaminate" not in json.loads((tmp_path / "out" / "manifest.json").read_text())["options"]
    files = ("--workers", "1", "--decontaminate", f"{inputs}/sst.tsv")
    assert build(inputs, tmp_path / "out", *files) == 2
    assert "holds a dataset of another build" in capsys.readouterr().err
    assert build(inputs, tmp_path / "out", *files, "--overwrite") == 0
    (inputs / "sst.tsv").write_text("another text that has words enough\n")
    assert build(inputs, tmp_path / "out", *files) == 2
    (inputs / "sst.tsv").write_text("too short\n")
    assert build(inputs, tmp_path / "new", *files) == 2
    assert "holds no text of 4 words or more" in capsys.readouterr().err
    (inputs / "sst.tsv").unlink()
    assert build(inputs, tmp_path / "new", *files) == 2
    assert "sst.tsv: can't be read: No such file" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc on this system")
def test_nothing_of_the_work_folder_is_open_when_it_is_removed(inputs, tmp_path, monkeypatch):
    """NFS keeps a file that is mapped under another name, and the folder that it is in can't be removed."""
    mapped = []
    whole = shutil.rmtree

    def removed(folder, *arguments, **named):
        if Path(folder).name == ".work":  # the folder of a stage's results is removed while others work
            maps = Path("/proc/self/maps").read_text().split("\n")
            mapped.append([line for line in maps if "/.work/" in line])
        whole(folder, *arguments, **named)

    (inputs / "hosts").write_text("example.org\n")
    monkeypatch.setattr(shutil, "rmtree", removed)
    files = ("--decontaminate", f"{inputs}/sst.tsv", "--drop-urls", f"{inputs}/hosts", "--allow")
    assert build(inputs, tmp_path / "out", "--workers", "1", *files) == 0
    assert mapped == [[]]

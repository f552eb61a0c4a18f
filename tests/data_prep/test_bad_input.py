"""Every mistake ends the command with exit code 2 (a full disk: 4) and one line, and leaves no dataset behind."""

import errno
import json
import resource
from functools import partial
from unittest.mock import MagicMock, Mock

import pyarrow.parquet
import pytest

from data_prep.__main__ import main
from data_prep.readers import decompress
from data_prep.stages import read
from tests.helpers import prep_builds
from tests.helpers.prep_builds import error_of
from tests.helpers.prep_reading import archive, contents, records, write, write_all

GOOD = "".join(
    "The first sentence is here. A second one follows it. " * 40 + f"Number {i} ends.\n\n" for i in range(30)
)


@pytest.fixture
def build(tokenizer_file, tmp_path, capsys):
    """Build inputs into tmp_path/out in this process, with the small tokenizer if no other is given: what it printed."""

    def run(inputs, code=0, **options):
        options = {"tokenizer": tokenizer_file, "workers": 1} | options
        given = {name: value for name, value in options.items() if value is not None}
        capsys.readouterr()
        assert main(prep_builds.build_words(inputs, tmp_path / "out", **given)) == code
        return capsys.readouterr()

    return run


def expect_error(printed, *parts):
    line = printed.err.strip()
    assert line.startswith("error: ") and "\n" not in line
    assert not [part for part in parts if str(part) not in line], line


def test_bad_input_stops_or_is_counted(build, tmp_path):
    bad = "fine téxt".encode() * 10 + b"\xc3\x28" + b" more"
    # an ASCII head, one byte of cp1252, UTF-8 behind it: that byte alone is lost
    mixed = GOOD.encode() + b"It costs 5 \x80 today. " + "Zürich ist schön. ".encode() * 9
    write_all(tmp_path, {"empty.txt": b"", "good.txt": GOOD, "bad.txt": bad, "mixed.txt": mixed})
    empty, bad, good = (tmp_path / f"{name}.txt" for name in ("empty", "bad", "good"))
    expect_error(build(empty, code=2), "no text", empty)
    expect_error(build([empty, bad, good], code=2), f"{bad}: byte 100: invalid UTF-8")
    assert not list(tmp_path.rglob("manifest.json"))
    printed = build([empty, bad, good], on_error="skip")
    assert "empty file 1" in printed.out and "invalid UTF-8 1" in printed.out
    options = {"overwrite": True, "save_text": True, "held_out": 0, "dedup": "none"}
    printed = build(tmp_path / "mixed.txt", encoding_errors="replace", **options)
    assert "invalid UTF-8 replaced 1" in printed.out, printed.err
    (saved,) = (tmp_path / "out").rglob("*.parquet")
    text = "\n".join(pyarrow.parquet.read_table(saved)["text"].to_pylist())
    assert text.count("Zürich ist schön.") == 9 and text.count("\ufffd") == 1 and "Ã" not in text


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_failing_read_names_the_input_file(policy, build, tmp_path, monkeypatch):
    file = MagicMock()
    file.__enter__.return_value.read.side_effect = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(decompress, "open_regular", lambda path: file)
    good = write(tmp_path / "good.txt", GOOD)
    expect_error(build(good, code=4, on_error=policy), f"{good}: Input/output error")


def test_lack_of_memory_is_one_line(build, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "clean_documents", Mock(side_effect=MemoryError))
    expect_error(build(write(tmp_path / "good.txt", GOOD), code=4), "build: out of memory")


def test_training_options_beside_a_tokenizer_are_named(build, tmp_path):
    good = write(tmp_path / "good.txt", GOOD)
    assert "only train another" not in build(good).err
    printed = build(good, vocab_size=99, lowercase=True, overwrite=True)
    assert "--tokenizer: it is used as it is; --vocab-size, --lowercase would only train another" in printed.err


def test_a_bad_byte_costs_its_line(build, tmp_path):
    """Also in a novel, which is one document; places, bytes and files are the same for any number of workers."""
    wrapped = b"The lines of this novel are wrapped, as most are, so that it has\n" * 2_000
    names = [write(tmp_path / f"novel-{i}.txt", wrapped[:70_000] + b"\xff" + wrapped[70_000:]) for i in range(7)]
    # a line: the words around the byte
    long = write(tmp_path / "long.txt", b"word " * 4_000 + b"\xff " + b"word " * 4_000)
    summaries = []
    for workers in (1, 2):
        options = {"on_error": "skip", "workers": workers, "overwrite": True, "dedup": "none"}
        printed = build([*names, long], json=tmp_path / "s.json", **options)
        summary = json.loads((tmp_path / "s.json").read_bytes())
        summaries.append((summary["problems"], summary["lost"], summary["read"]))
        assert "invalid UTF-8 8 (" in printed.out and f"bytes; {names[0]}, {names[1]}, …)" in printed.out
    assert summaries[0] == summaries[1]
    problems, lost, read = summaries[0]
    assert problems == {"invalid UTF-8": 8} and read["documents"] == 8
    assert lost["invalid UTF-8"]["files"] == [str(name) for name in names[:5]]
    # a line of 65 bytes and the bad one from each novel, at most 8 KiB of the long line
    assert 7 * 66 < lost["invalid UTF-8"]["bytes"] < 7 * 66 + 8_200
    assert read["bytes"] > 7 * (len(wrapped) - 66) + 31_000


def test_too_little_text_names_reasons_and_options(build, tmp_path):
    few, bad = write(tmp_path / "few.txt", "Only five words are here."), write(tmp_path / "bad.txt", b"\xffword\n")
    options = {"filters": "min-words=9", "on_error": "skip", "code": 2}
    parts = ("1 documents read", "min-words 1 (--filters … min-words=off)", "invalid UTF-8 1 (6 bytes; ")
    parts = (*parts, "bad.txt", "--encoding-errors")
    expect_error(build([few, bad], **options), "has only 0 tokens", *parts)
    expect_error(build([few, bad], tokenizer=None, **options), "no text to train a tokenizer on", *parts)
    nulls = write(tmp_path / "a.jsonl", records([None] * 3))
    expect_error(build(nulls, code=2), "3 documents read", "null value 3 (--text-field)")
    pdf = write(tmp_path / "a.pdf", b"%PDF-1.4")
    expect_error(build(pdf, on_error="skip", code=2), "no text there", "unknown format 1 (8 bytes; ", "a.pdf")


def test_wrong_files_and_options_are_named(build, tmp_path):
    tiny, good = write(tmp_path / "tiny.txt", "Just one line. And another."), write(tmp_path / "good.txt", GOOD)
    expect_error(build(tiny, code=2), "less than one row of 128")
    assert not (tmp_path / "out").exists()
    expect_error(build(good, tokenizer=tiny, code=2), tiny, "not a SentencePiece model")
    wrong = {"held_out": 0.9, "rows_per_shard": 1000, "workers": 0, "casing": "tr"}
    for option, value in wrong.items():
        expect_error(build(good, code=2, **{option: value}), f"--{option.replace('_', '-')}")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_too_large_vocabulary_names_the_largest(kind, build, tmp_path):
    build = partial(build, write(tmp_path / "good.txt", GOOD), tokenizer=None, model_type=kind)
    error = build(code=2).err
    assert "--vocab-size" in error and "30000" in error
    largest = error.split("lower it to at most ")[1].split(",")[0]
    build(vocab_size=largest)


def test_an_output_that_holds_something_is_refused(build, tmp_path):
    good, out = write(tmp_path / "good.txt", GOOD), tmp_path / "out"
    (out / ".work").mkdir(parents=True)  # of an interrupted build
    write(out / "shard-000007.tar", b"half")
    build(good)
    before = contents(out)
    dataset = {"manifest.json", "shard-000000.tar"}
    held_out = {f"held_out/{name}" for name in dataset}
    assert set(before) == dataset | held_out | {"build.json", "report.json", "tokenizer.model"}
    expect_error(build(good, seed=9, code=2), "another build", "seed was 0, is 9", "--overwrite")
    assert contents(out) == before
    build(good, seed=9, overwrite=True)
    assert contents(out) != before
    write(out / "thesis.tex", b"years of work")
    expect_error(build(good, overwrite=True, code=2), "thesis.tex")
    assert (out / "thesis.tex").read_bytes() == b"years of work"


@pytest.fixture(scope="module")
def undisturbed(corpus, tokenizer_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    prep_builds.build(corpus, out, tokenizer=tokenizer_file)
    return contents(out)


@pytest.mark.parametrize(
    ("limit", "workers"),
    [
        (1_500_000, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1_500_000, 1), (3_000_000, 1), (3_000_000, 2))),
    ],
)
def test_build_resumes_after_a_full_disk(workers, limit, corpus, tokenizer_file, undisturbed, tmp_path):
    """A limit on the size of a file stops the build while it reads, and while it writes shards."""
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    build = partial(prep_builds.build, corpus, tmp_path / "out", tokenizer=tokenizer_file, workers=workers)
    error = error_of(build(preexec_fn=limited, code=4))
    assert str(tmp_path / "out") in error and "disk is full" in error and "resumes" in error
    assert not list(tmp_path.rglob("manifest.json")) and not list(tmp_path.rglob("*.tmp"))
    build()
    assert contents(tmp_path / "out") == undisturbed


def test_a_dataset_without_bad_input_is_not_complete_for_stop(build, tmp_path):
    folder = write_all(tmp_path / "in", {"a.txt": GOOD, "b.txt": b"\xff", "c.txt": ""})
    build(folder, on_error="skip")
    expect_error(build(folder, code=2), "report.json: the dataset lacks bad input", "--on-error skip", "--overwrite")
    assert "nothing to do" in build(folder, on_error="skip").out
    write(folder / "b.txt", " ")
    build(folder, on_error="skip", overwrite=True)
    assert "nothing to do" in build(folder).out


@pytest.mark.parametrize("trained", [False, True])
def test_the_option_that_an_error_names_is_accepted(trained, build, tmp_path):
    more = {"tokenizer": None, "vocab_size": 37} if trained else {}
    path = write(tmp_path / "a.jsonl", records([GOOD]).replace('"text"', '"body"'))
    expect_error(build(path, code=2, **more), "name it with --text-field")
    build(path, text_field="body", **more)
    path = write(tmp_path / "b.txt", GOOD.encode() + b"\xe9")
    expect_error(build(path, code=2, overwrite=True, **more), "--encoding-errors replace")
    build(path, encoding_errors="replace", **more)


def test_options_without_an_effect_are_named(build, tmp_path):
    path = write(tmp_path / "a.txt", GOOD)
    printed = build(path, text_field="body", text_documents="file")
    assert "--text-field body: has no effect, since all files are text" in printed.err
    assert "--text-documents" not in printed.err and "formats    text 1\n" in printed.out
    printed = build(write(tmp_path / "a.jsonl", records([GOOD])), text_documents="line", overwrite=True)
    assert "--text-documents line: has no effect, since all files are jsonl" in printed.err
    for field in ("+", "."):
        expect_error(build(path, code=2, text_field=field), f"--text-field {field!r}: has no name of a field")


def test_guesses_of_archives_are_printed(build, tmp_path):
    path = write(tmp_path / "a.zip", archive("zip", {"w/train.txt": GOOD, "w/wiki.test.raw": "Words."}))
    printed = build(path)
    assert f"{path}: a document of plain text is a file, by its first bytes" in printed.out
    assert f"{path}: w/wiki.test.raw: of a test or validation split, will be training text" in printed.err

"""Every mistake ends the real command with exit code 2 (a full disk: 4) and one line, and leaves no dataset behind."""

import json
import resource

import pyarrow.parquet
import pytest

from tests.helpers.prep_reading import contents

GOOD = "".join(
    "The first sentence is here. A second one follows it. " * 40 + f"Number {i} ends.\n\n" for i in range(30)
)


@pytest.fixture()
def build(command, tokenizer_file, tmp_path):
    """Run a build of the named files into tmp_path/out, with the small tokenizer."""

    def run(*inputs, extra=(), tokenizer=tokenizer_file, **options):
        return command(
            "build", "--input", *inputs, "--output", tmp_path / "out", "--tokenizer", tokenizer, "--workers", 1,
            "--quiet", *extra, **options,
        )  # fmt: skip

    return run


def expect_error(result, *parts, status=2):
    """One `error:` line on stderr with each of `parts`, exit code `status`, no traceback."""
    assert result.returncode == status, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for part in parts:
        assert str(part) in lines[0]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_bad_input_stops_or_is_counted(build, tmp_path):
    empty, good = write(tmp_path / "empty.txt", b""), write(tmp_path / "good.txt", GOOD)
    bad = write(tmp_path / "bad.txt", "fine téxt".encode() * 10 + b"\xc3\x28" + b" more")
    expect_error(build(empty), "no text", empty)
    expect_error(build(empty, bad, good), f"{bad}: byte 100: invalid UTF-8")
    assert not list(tmp_path.rglob("manifest.json"))
    result = build(empty, bad, good, extra=("--on-error", "skip"))
    assert result.returncode == 0 and "empty file 1" in result.stdout and "invalid UTF-8 1" in result.stdout
    # an ASCII head, one byte of cp1252, UTF-8 behind it: that byte alone is lost
    mixed = write(
        tmp_path / "mixed.txt", GOOD.encode() + b"It costs 5 \x80 today. " + "Zürich ist schön. ".encode() * 9
    )
    extra = ("--encoding-errors", "replace", "--overwrite", "--save-text", "--held-out", "0", "--dedup", "none")
    result = build(mixed, extra=extra)
    assert result.returncode == 0 and "invalid UTF-8 replaced 1" in result.stdout, result.stderr
    (saved,) = (tmp_path / "out").rglob("*.parquet")
    text = "\n".join(pyarrow.parquet.read_table(saved)["text"].to_pylist())
    assert text.count("Zürich ist schön.") == 9 and text.count("\ufffd") == 1 and "Ã" not in text


def test_a_bad_byte_costs_its_line(build, tmp_path):
    """Also in a novel, which is one document; places, bytes and files are the same for any number of workers."""
    wrapped = "The lines of this novel are wrapped, as most are, so that it has\n" * 2_000
    names = []
    for i in range(7):
        text = wrapped.encode()
        names.append(write(tmp_path / f"novel-{i}.txt", text[:70_000] + b"\xff" + text[70_000:]))
    long = write(
        tmp_path / "long.txt", b"word " * 4_000 + b"\xff " + b"word " * 4_000
    )  # a line: the words around the byte
    summaries = []
    for workers in ("1", "2"):
        extra = (
            "--on-error",
            "skip",
            "--workers",
            workers,
            "--overwrite",
            "--json",
            tmp_path / "s.json",
            "--dedup",
            "none",
        )
        result = build(*names, long, extra=extra)
        assert result.returncode == 0, result.stderr
        summary = json.loads((tmp_path / "s.json").read_bytes())
        summaries.append((summary["problems"], summary["lost"], summary["read"]))
        assert "invalid UTF-8 8 (" in result.stdout and f"bytes; {names[0]}, {names[1]}, …)" in result.stdout
    assert summaries[0] == summaries[1]
    problems, lost, read = summaries[0]
    assert problems == {"invalid UTF-8": 8} and read["documents"] == 8
    assert lost["invalid UTF-8"]["files"] == [str(name) for name in names[:5]]
    # a line of 65 bytes and the bad one from each novel, at most 8 KiB of the long line
    assert 7 * 66 < lost["invalid UTF-8"]["bytes"] < 7 * 66 + 8_200
    assert read["bytes"] > 7 * (len(wrapped) - 66) + 31_000


def test_too_little_text_names_reasons_and_options(build, command, tmp_path):
    few, bad = write(tmp_path / "few.txt", "Only five words are here."), write(tmp_path / "bad.txt", b"\xffword\n")
    extra = ("--filters", "min-words=9", "--on-error", "skip")
    parts = (
        "1 documents read",
        "min-words 1 (--filters … min-words=off)",
        "invalid UTF-8 1 (6 bytes; ",
        "bad.txt",
        "--encoding-errors",
    )
    expect_error(build(few, bad, extra=extra), "makes only 0 tokens", *parts)
    arguments = ("build", "--input", few, bad, "--output", tmp_path / "out", "--workers", 1, "--quiet")
    expect_error(command(*arguments, *extra), "no text to train a tokenizer on", *parts)
    records = write(tmp_path / "a.jsonl", '{"text": null}\n' * 3)
    expect_error(build(records), "3 documents read", "null value 3 (--text-field)")
    pdf = write(tmp_path / "a.pdf", b"%PDF-1.4")
    expect_error(build(pdf, extra=("--on-error", "skip")), "no text there", "unknown format 1 (8 bytes; ", "a.pdf")


def test_wrong_files_and_options_are_named(build, tmp_path):
    tiny, good = write(tmp_path / "tiny.txt", "Just one line. And another."), write(tmp_path / "good.txt", GOOD)
    expect_error(build(tiny), "less than one row of 128")
    assert not (tmp_path / "out").exists()
    expect_error(build(good, tokenizer=tiny), tiny, "not a SentencePiece model")
    expect_error(build(good, tokenizer=tmp_path / "none.model"), "none.model", "not found")
    for extra in ("--seq-len 4", "--held-out 0.9", "--rows-per-shard 1000", "--workers 0"):
        expect_error(build(good, extra=extra.split()), extra.split()[0])


def test_too_large_vocabulary_names_the_largest(command, tmp_path):
    good = write(tmp_path / "good.txt", GOOD)
    for kind in ("unigram", "bpe"):
        arguments = ("build", "--input", good, "--output", tmp_path / kind, "--model-type", kind, "--workers", 1)
        result = command(*arguments, "--quiet")
        expect_error(result, "--vocab-size", "30000", "the largest that works is")
        largest = result.stderr.split("works is ")[1].split(",")[0]
        result = command(*arguments, "--vocab-size", largest, "--quiet")
        assert result.returncode == 0, result.stderr


def test_an_output_that_holds_something_is_refused(build, tmp_path):
    good = write(tmp_path / "good.txt", GOOD)
    (tmp_path / "out" / ".work").mkdir(parents=True)  # of an interrupted build
    write(tmp_path / "out" / "shard-000007.tar", b"half")
    assert build(good).returncode == 0
    before = contents(tmp_path / "out")
    dataset = {"manifest.json", "shard-000000.tar"}
    held_out = {f"held_out/{name}" for name in dataset}
    assert set(before) == dataset | held_out | {"build.json", "report.json", "tokenizer.model"}
    expect_error(build(good, extra=("--seed", "9")), "another build", "seed was 0, is 9", "--overwrite")
    assert contents(tmp_path / "out") == before
    assert build(good, extra=("--overwrite", "--seed", "9")).returncode == 0
    assert contents(tmp_path / "out") != before
    write(tmp_path / "out" / "thesis.tex", b"years of work")
    expect_error(build(good, extra=("--overwrite",)), "thesis.tex")
    assert (tmp_path / "out" / "thesis.tex").read_bytes() == b"years of work"


@pytest.fixture(scope="module")
def undisturbed(corpus, tokenizer_file, command, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    arguments = ("build", "--input", corpus, "--output", out, "--tokenizer", tokenizer_file, "--quiet")
    assert command(*arguments).returncode == 0
    return contents(out)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("limit", [1_500_000, 3_000_000])
def test_build_resumes_after_a_full_disk(workers, limit, build, corpus, undisturbed, tmp_path):
    """A limit on the size of a file stops the build while it reads, and while it writes shards."""

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = build(corpus, extra=("--workers", workers), preexec_fn=limited)
    expect_error(result, tmp_path / "out", "disk is full", "resumes", status=4)
    assert not list(tmp_path.rglob("manifest.json")) and not list(tmp_path.rglob("*.tmp"))
    assert build(corpus, extra=("--workers", workers)).returncode == 0
    assert contents(tmp_path / "out") == undisturbed

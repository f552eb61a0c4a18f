"""Every mistake ends the real command with exit code 2 (a full disk: 4) and one line, and leaves no dataset behind."""

import bz2
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

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


def test_empty_files_are_counted(build, tmp_path):
    empty = write(tmp_path / "empty.txt", b"")
    expect_error(build(empty), "no text", empty)
    result = build(empty, write(tmp_path / "good.txt", GOOD))
    assert result.returncode == 0 and "empty file 1" in result.stdout


def test_invalid_utf8_stops_or_is_skipped(build, tmp_path):
    bad = write(tmp_path / "bad.txt", "fine téxt".encode() * 10 + b"\xc3\x28" + b" more")
    good = write(tmp_path / "good.txt", GOOD)
    expect_error(build(bad, good), f"{bad}: byte 100: invalid UTF-8")
    assert not list(tmp_path.rglob("manifest.json"))
    result = build(bad, good, extra=("--on-error", "skip"))
    assert result.returncode == 0 and "invalid UTF-8 1" in result.stdout


def test_truncated_bz2_stops_or_keeps_what_came_before(build, tmp_path):
    packed = bz2.compress(GOOD.encode(), 1)
    cut = write(tmp_path / "wiki_00.bz2", packed[:-20])
    expect_error(build(cut), f"{cut}: truncated: the bz2 stream ends early")
    good = write(tmp_path / "good.txt", GOOD)
    result = build(cut, good, extra=("--on-error", "skip", "--overwrite"))
    assert result.returncode == 0 and "damaged or truncated file 1" in result.stdout


def test_unreadable_files_are_named(build, tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    expect_error(build(tmp_path / "pipe.txt"), tmp_path / "pipe.txt", "not a regular file")
    locked = write(tmp_path / "locked.txt", GOOD)
    locked.chmod(0)
    if not os.access(locked, os.R_OK):
        expect_error(build(locked), locked, "can't be read")


def test_an_interrupt_is_one_line(corpus, tokenizer_file, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "data_prep", "build", "--input", str(corpus), "--output", out, "--tokenizer",
         tokenizer_file, "--workers", "2", "--quiet"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not list(out.glob(".work/read-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
    assert os.listdir(out) == [".work"]


def test_a_corpus_smaller_than_a_row(build, tmp_path):
    expect_error(build(write(tmp_path / "tiny.txt", "Just one line. And another.")), "less than one row of 128")
    assert not (tmp_path / "out").exists()


def test_a_wrong_tokenizer(build, tmp_path):
    good = write(tmp_path / "good.txt", GOOD)
    wrong = write(tmp_path / "wrong.model", b"not a model")
    expect_error(build(good, tokenizer=wrong), wrong, "not a SentencePiece model")
    expect_error(build(good, tokenizer=tmp_path / "none.model"), "none.model", "not found")


def test_too_large_vocabulary_names_the_largest(command, tmp_path):
    good = write(tmp_path / "good.txt", GOOD)
    for kind in ("unigram", "bpe"):
        arguments = (
            "build", "--input", good, "--output", tmp_path / kind, "--model-type", kind, "--quiet", "--workers", 1,
        )  # fmt: skip
        result = command(*arguments)
        expect_error(result, "--vocab-size", "30000", "the largest that works is")
        largest = result.stderr.split("works is ")[1].split(",")[0]
        result = command(*arguments, "--vocab-size", largest)
        assert result.returncode == 0, result.stderr


def test_an_output_that_holds_something_is_refused(build, tmp_path):
    good = write(tmp_path / "good.txt", GOOD)
    assert build(good).returncode == 0
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    expect_error(build(good, extra=("--seed", "9")), "another build", "seed was 0, is 9", "--overwrite")
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert build(good, extra=("--overwrite", "--seed", "9")).returncode == 0
    assert (tmp_path / "out" / "manifest.json").read_bytes() != before
    write(tmp_path / "out" / "thesis.tex", b"years of work")
    expect_error(build(good, extra=("--overwrite",)), "thesis.tex")
    assert (tmp_path / "out" / "thesis.tex").read_bytes() == b"years of work"


def test_leftovers_of_an_interrupted_build_are_replaced(build, tmp_path):
    (tmp_path / "out" / ".work").mkdir(parents=True)
    write(tmp_path / "out" / "shard-000007.tar", b"half")
    assert build(write(tmp_path / "good.txt", GOOD)).returncode == 0
    assert sorted(os.listdir(tmp_path / "out")) == [
        "build.json",
        "manifest.json",
        "report.json",
        "shard-000000.tar",
        "tokenizer.model",
    ]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(corpus, tokenizer_file, command, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    arguments = ("build", "--input", corpus, "--output", out, "--tokenizer", tokenizer_file, "--quiet")
    assert command(*arguments).returncode == 0
    return files(out)


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
    assert files(tmp_path / "out") == undisturbed


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (("--seq-len", "4"), "--seq-len"),
        (("--held-out", "0.9"), "--held-out"),
        (("--rows-per-shard", "1000"), "--rows-per-shard"),
        (("--workers", "0"), "--workers"),
    ],
)
def test_option_out_of_range_is_named(extra, name, build, tmp_path):
    expect_error(build(write(tmp_path / "good.txt", GOOD), extra=extra), name)

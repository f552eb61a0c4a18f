"""A build of what comes through a pipe: the bytes of the same text in a file, and how it goes on after it was stopped."""

import gzip
import io
import sys

import pytest

from data_prep.__main__ import main
from data_prep.common.errors import BadInput
from data_prep.common.records import Corpus
from data_prep.executor import pipe, upload
from megabert.common import remote, retry

TEXT = "".join(f"Line {i} tells of a river that runs to the sea. " * 9 + "\n" for i in range(300)).encode()


class Stdin:
    def __init__(self, data):
        self.buffer = io.BytesIO(data)


@pytest.fixture
def options(tokenizer_file):
    return ["--tokenizer", str(tokenizer_file), "--workers", "1", "--quiet", "--text-documents", "line",
            "--format", "text", "--dedup", "none"]  # fmt: skip


def shards_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.tar"))}


@pytest.mark.parametrize("data", [gzip.compress(TEXT)], ids=["gzip"])
def test_a_pipe_gives_the_bytes_of_a_file(data, options, tmp_path, monkeypatch):
    (tmp_path / "file.stdin").write_bytes(data)
    local, piped = tmp_path / "local", tmp_path / "piped"
    assert main(["build", "--input", str(tmp_path / "file.stdin"), "--output", str(local), *options]) == 0
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert main(["build", "--input", "-", "--output", str(piped), *options]) == 0
    assert shards_of(piped) == shards_of(local) and shards_of(local)
    assert not pipe.spool_of(str(piped)).exists()


def test_a_build_that_failed_keeps_what_came(options, tmp_path, monkeypatch, caplog):
    output = tmp_path / "out"
    monkeypatch.setattr(sys, "stdin", Stdin(TEXT + b"\xff\xfe bad\n"))
    assert main(["build", "--input", "-", "--output", str(output), *options, "--encoding", "utf-8"]) == 2
    kept = tmp_path / "out.stdin"
    assert kept.read_bytes().startswith(TEXT)
    assert f"goes on with --input {kept}" in caplog.text
    assert main(["build", "--input", "-", "--output", str(output), *options]) == 2
    assert f"{kept}: is there already; go on with --input {kept}" in caplog.text
    kept.write_bytes(TEXT)
    assert main(["build", "--input", str(kept), "--output", str(output), *options, "--encoding", "utf-8"]) == 0
    assert shards_of(output) and kept.read_bytes() == TEXT


def test_standard_input_is_read_once(tmp_path):
    with pytest.raises(BadInput, match="named 2 times"):
        pipe.spooled([Corpus("a", ("-",)), Corpus("b", ("-",))], str(tmp_path / "d"), io.BytesIO(b""))


def test_parts_take_no_pipe(options, tmp_path, capsys, caplog):
    assert main(["build", "--input", "-", "--output", str(tmp_path / "o"), "--part", "1/2", *options]) == 2
    assert "--input -: one process reads standard input" in caplog.text + capsys.readouterr().err


def test_an_upload_that_failed_goes_on_with_what_came(options, tmp_path, monkeypatch):
    """The dataset is whole, and not yet where it goes to."""
    monkeypatch.setenv("MEGABERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", Stdin(TEXT))
    url = f"file://{tmp_path}/far"
    spool = pipe.spool_of(str(upload.staging(url)))
    whole = remote.upload

    def gone(path, to):
        if to.endswith(".tar"):
            raise OSError(5, "gone", to)
        whole(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(remote, "upload", gone)
        patched.setattr(retry, "WAITS", ())
        assert main(["build", "--input", "-", "--output", url, *options]) == 4
    assert spool.read_bytes() == TEXT and not shards_of(tmp_path / "far")
    assert main(["build", "--input", str(spool), "--output", url, *options]) == 0
    assert shards_of(tmp_path / "far")

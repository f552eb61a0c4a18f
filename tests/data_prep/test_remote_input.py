"""Builds whose input lies at URLs: the bytes of the same files on disk, and what may happen on the way."""

import bz2
import gzip
import hashlib

import fsspec
import pytest

from data_prep.arguments import corpora
from data_prep.common.errors import BadInput, Problems
from data_prep.executor.input_list import KnownFiles
from data_prep.readers import documents, tasks
from megabert.common import errors
from megabert.common.errors import Failed
from tests.helpers.prep_reading import plan, read_all
from tests.helpers.web import serving

TEXTS = [f"Document {i} says that rivers run to the sea. " * 40 for i in range(60)]


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setattr(errors, "WAITS", (0.0, 0.0, 0.0))
    with serving() as found:
        yield found


def files_of():
    lines = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS).encode()
    wiki = "".join(f'<doc id="1" url="u" title="t">\nt\n\n{text}\n</doc>\n' for text in TEXTS).encode()
    plain = "\n\n".join(TEXTS).encode()
    return {
        "a.jsonl": lines,
        "b.jsonl.gz": gzip.compress(lines, mtime=0),
        "deep/c.bz2": bz2.compress(wiki),
        "deep/d.txt": plain,
    }


@pytest.fixture
def both(tmp_path):
    """The same files in a folder and at a URL."""
    system = fsspec.filesystem("memory")
    url = f"memory://{tmp_path.name}"
    for name, data in files_of().items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
        system.pipe(f"/{tmp_path.name}/{name}", data)
    system.pipe(f"/{tmp_path.name}/.hidden", b"no")
    yield tmp_path / "in", url
    system.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize("pattern", ["", "/*", "/deep/*.txt", "/a.jsonl", "/**/*"])
def test_urls_are_read_like_local_files(both, pattern):
    folder, url = both
    expected = read_all([f"{folder}{pattern}"])
    assert read_all([f"{url}{pattern}"])[0] == expected[0] and expected[0]


def test_large_files_are_cut_and_unpacked_alike(both, monkeypatch):
    folder, url = both
    monkeypatch.setattr(documents, "RANGE_BYTES", 1 << 12)
    monkeypatch.setattr(tasks, "SMALL", 1 << 10)

    def cuts(root):
        return [
            (piece.path.removeprefix(str(root)), piece.start, piece.end, piece.size, piece.unpack_first)
            for task in plan([str(root)])
            for piece in task.ranges
        ]

    assert cuts(url) == cuts(folder)
    assert any(end for _, _, end, _, _ in cuts(url)) and any(stream for *_, stream in cuts(url))


def test_parquet_at_a_url(both):
    import pyarrow
    import pyarrow.parquet

    folder, url = both
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "t.parquet", row_group_size=7)
    fsspec.filesystem("memory").pipe(f"{url}/t.parquet", (folder / "t.parquet").read_bytes())
    assert read_all([f"{url}/t.parquet"])[0] == TEXTS


def test_what_is_not_there_is_one_line(both):
    _, url = both
    for item, said in (
        (f"{url}/no.txt", f"--input {url}/no.txt: no such file or folder"),
        (f"{url}/*.zip", f"--input {url}/*.zip: no file matches it"),
    ):
        with pytest.raises(BadInput) as refused:
            plan([item])
        assert str(refused.value) == said


def test_a_corpus_of_urls_has_a_name():
    found = corpora(["wiki=s3://b/k", "https://h/x?a=b", "hf://d", "books=gs://b/*.txt"], [])
    assert [(corpus.name, corpus.paths) for corpus in found] == [
        ("wiki", ("s3://b/k", "https://h/x?a=b", "hf://d")),
        ("books", ("gs://b/*.txt",)),
    ]


def test_a_file_that_changes_is_noticed(both):
    _, url = both
    pieces = [piece for task in plan([f"{url}/a.jsonl"]) for piece in task.ranges]
    fsspec.filesystem("memory").pipe(f"{url}/a.jsonl", files_of()["a.jsonl"].replace(b"rivers", b"brooks"))
    with pytest.raises(BadInput, match=r"a\.jsonl: changed while it was read"):
        list(documents.read_documents(pieces[0], tasks.ReadOptions(), Problems("stop")))


def test_a_network_that_fails_is_never_skipped(web):
    web.files["/c/a.txt"] = TEXTS[0].encode()
    pieces = [piece for task in plan([f"{web.url}/c/a.txt"]) for piece in task.ranges]
    web.faults = [503, 503]
    assert [d.text.decode() for d in documents.read_documents(pieces[0], tasks.ReadOptions(), Problems("skip"))] == [
        TEXTS[0]
    ]
    web.faults = [503] * 4
    with pytest.raises(Failed, match="503"):
        list(documents.read_documents(pieces[0], tasks.ReadOptions(), Problems("skip")))


def test_a_suffix_stands_before_the_query(web):
    web.files["/c/a.txt.gz"] = gzip.compress(b"one")
    assert read_all([f"{web.url}/c/a.txt.gz?token=a.b/c.d"])[0] == ["one"]


def test_input_list_knows_urls(both, tmp_path, monkeypatch):
    from data_prep.executor import input_list

    _, url = both
    pieces = [(0, piece) for task in plan([url]) for piece in task.ranges]
    input_list.write(tmp_path, pieces)
    monkeypatch.chdir(tmp_path)  # a URL is no path below the folder that a command is started in
    known = KnownFiles([tmp_path])
    assert all(known(piece.path) for _, piece in pieces) and not known(f"{url}/other")


def test_a_build_from_urls_writes_the_same_shards(both, tmp_path, tokenizer_file, caplog):
    from data_prep.__main__ import main

    folder, url = both
    digests = []
    for number, root in enumerate((folder, url)):
        output = tmp_path / f"out{number}"
        options = ["--tokenizer", str(tokenizer_file), "--workers", "1", "--quiet", "--dedup", "none"]
        assert main(["build", "--input", str(root), "--output", str(output), "--held-out", "0.1", *options]) == 0
        digests.append(
            {
                str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(output.rglob("*.tar"))
            }
        )
    assert digests[0] == digests[1] and len(digests[0]) == 2
    again = ["build", "--input", url, "--output", str(output), "--held-out", "0.1", *options]
    assert main(again) == 0 and "complete already" in caplog.text
    fsspec.filesystem("memory").pipe(f"{url}/deep/d.txt", b"Another text of the same length, or not.")
    assert main(again) == 2 and "holds a dataset of another build (input files" in caplog.text

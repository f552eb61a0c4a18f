"""A large file gives the same rows whatever it is packed in, read by as many as its format allows."""

import bz2
import gzip
import json
import lzma

import pytest
import zstandard

from data_prep.build import build
from data_prep.common.errors import Problems, Unfinished
from data_prep.common.records import Corpus, FileRange, ReadOptions
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob, ItemResult
from data_prep.options import BuildOptions
from data_prep.readers import decompress, documents, tasks
from data_prep.stages import unpack
from megabert.data.tokenizer import Tokenizer

PACK = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": lambda data: bz2.compress(data, 1),  # blocks of 100 KB
    "bz2 of streams": lambda data: b"".join(bz2.compress(data[i : i + 30_000]) for i in range(0, len(data), 30_000)),
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
    "utf-16": lambda data: data.decode().encode("utf-16"),
}
PARTS = {"bz2": 2, "bz2 of streams": 2}  # at least
MAKE = {
    "text": lambda i, text: text.replace("\n\n", "\n") + "\n\n",
    "jsonl": lambda i, text: json.dumps({"text": text}, ensure_ascii=False) + "\n",
    "wiki": lambda i, text: f'<doc id="{i}" title="Ä">\nÄ\n\n{text}\n</doc>\n',
}


@pytest.fixture
def small_ranges(monkeypatch):
    monkeypatch.setattr(documents, "RANGE_BYTES", 1 << 17)
    monkeypatch.setattr(tasks, "TASK_BYTES", (1 << 16, 1 << 18))
    monkeypatch.setattr(unpack, "BZIP2_BYTES", 20_000)
    monkeypatch.setitem(decompress.FEED, "bz2", 4_096)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.tar")}


@pytest.fixture
def make(tokenizer_file, tmp_path, monkeypatch):
    calls = []
    real = unpack.unpack

    def recorded(job, part):
        calls.append(part.range)
        return real(job, part)

    monkeypatch.setattr(unpack, "unpack", recorded)

    def run(path, **options):
        """(shards, parts that were unpacked) of a build of one file."""
        calls.clear()
        output = tmp_path / f"out-{path.name}"
        given = BuildOptions(held_out=0.02, rows_per_shard=256, read=ReadOptions(**options))
        build([Corpus("input", (str(path),))], output, given, Pool(1), Tokenizer.load(tokenizer_file), progress=False)
        assert not (output / ".work").exists()
        return contents(output), list(calls)

    return run


@pytest.mark.parametrize("kind", MAKE)
def test_packed_file_gives_the_same_rows(kind, small_ranges, topics, make, tmp_path):
    data = "".join(MAKE[kind](i, text) for i, text in enumerate(topics[:60])).encode()
    options = {"format": kind, "text_documents": "blank-line" if kind == "text" else "auto"}
    (tmp_path / "plain.txt").write_bytes(data)
    want, parts = make(tmp_path / "plain.txt", **options)
    assert len(want) >= 2 and not parts
    for name, pack in PACK.items() if kind != "text" else list(PACK.items())[:3]:
        path = tmp_path / f"packed {name}"
        path.write_bytes(pack(data))
        found, parts = make(path, **options)
        if kind == "wiki" and name == "bz2 of streams":
            assert not parts  # is read by its streams, as it was before
            continue
        assert found == want, name
        assert len(parts) >= PARTS.get(name, 1), name


def test_small_file_that_packs_well_is_unpacked(small_ranges, make, tmp_path):
    """20 KB that hold a megabyte are no task for one worker's memory."""
    lines = [f"Entry {i % 50} of the log says that all is well, as the one before.\n" for i in range(20_000)]
    for name, pack in (("gz", gzip.compress), ("zst", zstandard.compress), ("bz2", bz2.compress)):
        path = tmp_path / name
        path.write_bytes(pack("".join(lines).encode()))
        assert path.stat().st_size < documents.RANGE_BYTES // 4 * 3 // 2
        (piece,) = [
            piece for _, piece in tasks.list_ranges([Corpus("i", (str(path),))], ReadOptions(), Problems("stop"))
        ]
        assert piece.unpack_first, name


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("name", ["gz", "bz2"])
def test_damage_in_a_large_file(name, policy, small_ranges, topics, tokenizer_file, tmp_path):
    data = "".join(MAKE["wiki"](i, text) for i, text in enumerate(topics[:60])).encode()
    packed = bytearray(PACK[name](data))
    packed[len(packed) * 2 // 3] ^= 0x55
    path = tmp_path / "damaged"
    path.write_bytes(packed)
    corpora, output = [Corpus("input", (str(path),))], tmp_path / "out"
    options = BuildOptions(rows_per_shard=256)

    def run():
        return build(corpora, output, options, Pool(1), Tokenizer.load(tokenizer_file), on_error=policy, progress=False)

    if policy == "stop":
        with pytest.raises(Unfinished, match=r"damaged: (damaged|truncated|byte)"):
            run()
        path.write_bytes(PACK[name](data))
        assert run()["read"]["documents"] == 60
    else:
        summary = run()
        assert sum(summary["problems"].values()) >= 1
        assert 10 < summary["read"]["documents"] < 60


def test_build_stopped_while_unpacking_resumes(small_ranges, topics, tokenizer_file, tmp_path, monkeypatch):
    data = "".join(MAKE["wiki"](i, text) for i, text in enumerate(topics[:60])).encode()
    path = tmp_path / "d"
    path.write_bytes(bz2.compress(data, 1))
    corpora, calls = [Corpus("input", (str(path),))], []
    real = unpack.unpack

    def stopping(job, part):
        calls.append(part.number)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(job, part)

    stopping.__name__ = "unpack"
    monkeypatch.setattr(unpack, "unpack", stopping)

    def run(name):
        build(corpora, tmp_path / name, BuildOptions(), Pool(1), Tokenizer.load(tokenizer_file), progress=False)
        return contents(tmp_path / name)

    with pytest.raises(KeyboardInterrupt):
        run("killed")
    assert len(list((tmp_path / "killed/.work").glob("stream-*.zst"))) >= 2
    found = run("killed")
    assert calls[:4] == [0, 1, 2, 2], "a part that was done is not done again"
    assert found == run("at once")


def test_nothing_is_read_after_skipped_damage(tmp_path):
    """Text of both sides of a hole would be one document."""
    job = BuildJob(BuildOptions(), "", str(tmp_path), "skip")
    piece = FileRange("dump.bz2", "bz2", "wiki", size=3, unpack_first=True)
    items = [unpack.UnpackPart(0, number, piece) for number in range(3)]
    results = [ItemResult(facts={"spools": [[f"spool {number}", 100]], "whole": number != 1}) for number in range(3)]
    ((_, text),) = unpack.cut(job, [(0, piece)], items, results)
    assert [name for name, *_ in json.loads((tmp_path / text.index).read_bytes())] == ["spool 0", "spool 1"]
    assert text.size == 200 and not text.unpack_first

"""Decompression: every format, truncation and damage, ranges of bzip2 files."""

import bz2
import io
import random

import pytest
import zstandard

from data_prep.common.errors import BadInput
from data_prep.readers import decompress
from data_prep.readers.decompress import detect_compression, first_stream, read_chunks
from tests.helpers.prep_reading import PACK, read_all, refuse, write

DATA = random.Random(1).randbytes(50_000) + b"line of text\n" * 400_000
each_kind = pytest.mark.parametrize("kind", PACK)


@pytest.fixture
def path(kind, tmp_path):
    return tmp_path / f"a.txt.{kind}"


@each_kind
def test_streams_and_padding_unpack(kind, path):
    packed = PACK[kind](DATA)
    assert detect_compression(packed) == kind
    for more, want in ((b"", DATA), (bytes(300) + PACK[kind](b"tail"), DATA + b"tail"), (bytes(512), DATA)):
        chunks = list(read_chunks(str(write(path, packed + more)), kind))
        assert b"".join(chunks) == want
        assert max(map(len, chunks)) <= 16 << 20


@each_kind
def test_damage_and_truncation_name_the_file(kind, path):
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if kind == "zst" else PACK[kind]
    packed = bytearray(pack(DATA[:60_000]))
    for share in (0.01, 0.3, 0.6, 0.9, 0.999):
        write(path, packed[: max(5, int(len(packed) * share))])
        with pytest.raises(BadInput, match=rf"a\.txt\.{kind}: truncated: the \w+ stream ends early, after \d+"):
            list(read_chunks(str(path), kind))
    packed[len(packed) // 2] ^= 0x10
    with pytest.raises(BadInput, match=rf"a\.txt\.{kind}: "):
        list(read_chunks(str(write(path, packed)), kind))


@each_kind
def test_a_bomb_costs_bounded_memory_and_time(kind, path):
    write(path, PACK[kind](bytes(150 << 20)))
    total = largest = 0
    with pytest.raises(BadInput, match=rf"a\.txt\.{kind}: unpacks to more than 200 times its size"):
        for chunk in read_chunks(str(path), kind):
            total, largest = total + len(chunk), max(largest, len(chunk))
    assert largest <= 64 << 20 and 36 << 20 <= total <= 100 << 20


FRAME = b"\x2a\x4d\x18\x04\0\0\0abcd"  # as pzstd writes before each frame, behind a byte from 0x50 to 0x5f
WINDOW = b"\x28\xb5\x2f\xfd\x00\xa8"  # of 2 GiB, as by --long=31
ZSTD = [(b"%c" % byte + FRAME + PACK["zst"](b"text ")) * 2 + b"%c" % byte + FRAME for byte in (0x50, 0x5A, 0x5F)]


@pytest.mark.parametrize("packed", [*ZSTD, WINDOW + (10 << 3 | 1).to_bytes(3, "little") + b"text text "])
def test_zstd_skippable_frames_and_large_windows(packed, tmp_path):
    path = write(tmp_path / "a.txt.zst", packed)
    assert detect_compression(packed) == "zst" and b"".join(read_chunks(str(path), "zst")) == b"text text "
    assert [text.strip() for text in read_all([path])[0]] == ["text text"]


@each_kind
def test_the_ratio_is_of_all_streams(kind):
    """Of dumps and archives of the web the first stream is a header; zstd may begin with a skippable frame."""
    head, text = b"<siteinfo/>\n", b"line of text\n" * 40_000
    for streams in ((head, text), (random.Random(2).randbytes(750_000).hex().encode(),)):
        packed = b"".join(map(PACK[kind], streams))
        packed = (b"\x50" + FRAME) * (kind == "zst") + packed
        want = sum(map(len, streams)) / len(packed)
        assert decompress.ratio(io.BytesIO(packed), kind) == pytest.approx(want, rel=0.1), len(streams)


def test_bzip2_streams_end_a_range(tmp_path, monkeypatch):
    packed = [bz2.compress(b"%d " % i * 1000) for i in range(6)]
    starts = [sum(map(len, packed[:i])) for i in range(7)]
    path = str(write(tmp_path / "many.bz2", b"".join(packed)))
    for start in range(0, starts[-1], 7):
        want = next((s for s in starts[:-1] if s >= start), None) if start else 0
        assert first_stream(path, start, starts[-1]) == want
    assert first_stream(path, starts[1] + 1, starts[2]) is None
    assert first_stream(path, starts[1] + 1, starts[2] + 1) == starts[2]
    monkeypatch.setattr(decompress, "PLAIN_CHUNK", starts[2] - starts[1])  # a read ends where the range does
    assert first_stream(path, starts[1] + 1, starts[2] + 1) == starts[2]
    for i in range(1, 6):
        reached = []
        data = b"".join(read_chunks(path, "bz2", starts[1], starts[i] + 1, reached.append))
        assert data == b"".join(b"%d " % j * 1000 for j in range(1, 6))
        assert reached == [2000 * i]


@each_kind
@pytest.mark.parametrize("tail", [b"<html>Not found</html>", b"\n", bytes(9) + b"x"])
def test_other_data_behind_the_text_is_counted(kind, tail, path):
    write(path, PACK[kind](b"Some words\nand more") + PACK[kind](b", to its end") + tail)
    found, problems = refuse(path, rf"a\.txt\.{kind}: trailing data after the {kind} stream of 31 decompressed bytes")
    assert found == ["Some words\nand more, to its end"]
    lost = {"bytes": len(tail.lstrip(b"\0")), "files": [str(path)]}
    assert problems.lost == {"trailing data after the compressed text": lost}


@each_kind
def test_text_before_the_damage_is_kept(kind, path):
    lines = [b"%d is line %d of the file.\n" % (i * i * 7919 % 99_991, i) for i in range(100_000)]
    packed = PACK[kind](b"".join(lines))
    write(path, packed[: len(packed) * 9 // 10])
    found, problems = read_all([path], "skip", text_documents="line")
    assert len(found) > 10_000 and [text.encode() + b"\n" for text in found] == lines[: len(found)]
    assert problems.counts == {"damaged or truncated file": 1}
    (text,), _ = read_all([path], "skip", text_documents="file")
    assert text.encode() == b"".join(lines[: len(found)])

"""Decompression: every format, truncation and damage, ranges of bzip2 files."""

import bz2
import random

import pytest
import zstandard

from data_prep.common.errors import BadInput
from data_prep.readers import decompress
from data_prep.readers.decompress import RangeEnd, detect_compression, first_stream, read_chunks
from tests.helpers.prep_reading import PACK, read_all

DATA = random.Random(1).randbytes(50_000) + b"line of text\n" * 400_000


@pytest.mark.parametrize("kind", PACK)
def test_streams_and_padding_unpack(kind, tmp_path):
    path = tmp_path / "file"
    packed = PACK[kind](DATA)
    assert detect_compression(packed) == kind
    for more, want in ((b"", DATA), (bytes(300) + PACK[kind](b"tail"), DATA + b"tail"), (bytes(512), DATA)):
        path.write_bytes(packed + more)
        chunks = list(read_chunks(str(path), kind))
        assert b"".join(chunks) == want
        assert max(map(len, chunks)) <= 16 << 20


@pytest.mark.parametrize("kind", PACK)
def test_damage_and_truncation_name_the_file(kind, tmp_path):
    path, pack = tmp_path / "bad", PACK[kind]
    if kind == "zst":
        pack = zstandard.ZstdCompressor(write_checksum=True).compress
    packed = bytearray(pack(DATA[:60_000]))
    for share in (0.01, 0.3, 0.6, 0.9, 0.999):
        path.write_bytes(packed[: max(5, int(len(packed) * share))])
        with pytest.raises(BadInput, match=r"bad: truncated: the \w+ stream ends early, after \d+"):
            list(read_chunks(str(path), kind))
    packed[len(packed) // 2] ^= 0x10
    path.write_bytes(packed)
    with pytest.raises(BadInput, match="bad: "):
        list(read_chunks(str(path), kind))


@pytest.mark.parametrize("kind", PACK)
def test_a_bomb_costs_bounded_memory_and_time(kind, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(PACK[kind](bytes(300 << 20)))
    total = largest = 0
    with pytest.raises(BadInput, match=r"bomb: unpacks to more than 200 times its size"):
        for chunk in read_chunks(str(path), kind):
            total, largest = total + len(chunk), max(largest, len(chunk))
    assert largest <= 64 << 20 and 36 << 20 <= total <= 100 << 20


@pytest.mark.parametrize("number", [0x50, 0x5A, 0x5F])
def test_skippable_frames_are_skipped(number, tmp_path):
    path = tmp_path / "file"
    frame = bytes([number]) + b"\x2a\x4d\x18\x04\0\0\0abcd"  # as pzstd writes before each frame
    path.write_bytes((frame + PACK["zst"](b"text ")) * 2 + frame)
    assert detect_compression(path.read_bytes()) == "zst"
    assert b"".join(read_chunks(str(path), "zst")) == b"text text "


def test_bzip2_streams_end_a_range(tmp_path, monkeypatch):
    path = tmp_path / "many.bz2"
    packed = [bz2.compress(b"%d " % i * 1000) for i in range(6)]
    starts = [sum(map(len, packed[:i])) for i in range(7)]
    path.write_bytes(b"".join(packed))
    for start in range(0, starts[-1], 7):
        want = next((s for s in starts[:-1] if s >= start), None) if start else 0
        assert first_stream(str(path), start, starts[-1]) == want
    assert first_stream(str(path), starts[1] + 1, starts[2]) is None
    assert first_stream(str(path), starts[1] + 1, starts[2] + 1) == starts[2]
    monkeypatch.setattr(decompress, "PLAIN_CHUNK", starts[2] - starts[1])  # a read ends where the range does
    assert first_stream(str(path), starts[1] + 1, starts[2] + 1) == starts[2]
    for i in range(1, 6):
        edge = RangeEnd()
        data = b"".join(read_chunks(str(path), "bz2", starts[1], starts[i] + 1, edge))
        assert data == b"".join(b"%d " % j * 1000 for j in range(1, 6))
        assert edge.end == 2000 * i


def test_zstd_windows_of_two_gigabytes_are_read(tmp_path):
    path = tmp_path / "a.txt.zst"
    frame = b"\x28\xb5\x2f\xfd\x00\xa8"  # window of 2 GiB, as by --long=31
    path.write_bytes(frame + (len(b"Some words.") << 3 | 1).to_bytes(3, "little") + b"Some words.")
    assert read_all([path])[0] == ["Some words."]


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("tail", [b"<html>Not found</html>", b"\n", bytes(9) + b"x"])
def test_other_data_behind_the_text_is_counted(kind, tail, tmp_path):
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(PACK[kind](b"Some words\nand more") + PACK[kind](b", to its end") + tail)
    with pytest.raises(
        BadInput, match=rf"a\.txt\.{kind}: something else follows the {kind} data after 31 unpacked bytes"
    ):
        read_all([path])
    found, problems = read_all([path], "skip")
    assert found == ["Some words\nand more, to its end"]
    size = len(tail.lstrip(b"\0"))
    assert problems.lost == {"other data behind packed text": {"bytes": size, "files": [str(path)]}}


@pytest.mark.parametrize("kind", PACK)
def test_text_before_the_damage_is_kept(kind, tmp_path):
    lines = [b"%d is line %d of the file.\n" % (i * i * 7919 % 99_991, i) for i in range(100_000)]
    packed = PACK[kind](b"".join(lines))
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(packed[: len(packed) * 9 // 10])
    found, problems = read_all([path], "skip", text_documents="line")
    assert len(found) > 10_000 and [text.encode() + b"\n" for text in found] == lines[: len(found)]
    assert problems.counts == {"damaged or truncated file": 1}
    (text,), _ = read_all([path], "skip", text_documents="file")
    assert text.encode() == b"".join(lines[: len(found)])

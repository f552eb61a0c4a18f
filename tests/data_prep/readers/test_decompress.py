"""Decompression: every format, truncation and damage, ranges and blocks of bzip2 files."""

import bz2
import gzip
import lzma
import random

import pytest
import zstandard

from data_prep.common.errors import BadInput
from data_prep.readers import decompress
from data_prep.readers.decompress import RangeEnd, block_marks, compression_of, first_stream, read_blocks, read_chunks

PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
}
DATA = random.Random(1).randbytes(50_000) + b"line of text\n" * 400_000


@pytest.mark.parametrize("kind", PACK)
def test_streams_and_padding_unpack(kind, tmp_path):
    path = tmp_path / "file"
    packed = PACK[kind](DATA)
    assert compression_of(packed) == kind
    for content, want in ((packed, DATA), (packed + PACK[kind](b"tail"), DATA + b"tail"), (packed + b"\0" * 512, DATA)):
        path.write_bytes(content)
        chunks = list(read_chunks(str(path), kind))
        assert b"".join(chunks) == want
        assert max(map(len, chunks)) <= 16 << 20


@pytest.mark.parametrize("kind", PACK)
def test_every_truncation_names_the_file(kind, tmp_path):
    path = tmp_path / "cut"
    packed = PACK[kind](DATA[:60_000])
    for share in (0.01, 0.3, 0.6, 0.9, 0.999):
        path.write_bytes(packed[: max(5, int(len(packed) * share))])
        with pytest.raises(BadInput, match=r"cut: truncated: the \w+ stream ends early, after \d+"):
            list(read_chunks(str(path), kind))


@pytest.mark.parametrize("kind", PACK)
def test_a_flipped_byte_never_passes_as_the_data(kind, tmp_path):
    path = tmp_path / "flip"
    pack = PACK[kind]
    if kind == "zst":
        pack = zstandard.ZstdCompressor(write_checksum=True).compress
    packed = bytearray(pack(DATA[:60_000]))
    packed[len(packed) // 2] ^= 0x10
    path.write_bytes(packed)
    with pytest.raises(BadInput, match="flip: "):
        list(read_chunks(str(path), kind))


BOMBS = {
    "gz": lambda: gzip.compress(bytes(300 << 20), 9),
    "bz2": lambda: bz2.compress(bytes(300 << 20)),
    "xz": lambda: lzma.compress(bytes(300 << 20), preset=0),
    "zst": lambda: zstandard.ZstdCompressor().compress(bytes(300 << 20)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_costs_bounded_memory_and_time(kind, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[kind]())
    total = largest = 0
    with pytest.raises(BadInput, match=r"bomb: unpacks to more than 200 times its size"):
        for chunk in read_chunks(str(path), kind):
            total, largest = total + len(chunk), max(largest, len(chunk))
    assert largest <= 64 << 20 and 36 << 20 <= total <= 100 << 20


def test_padding_and_skippable_frames_are_skipped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(b"one ") + bytes(300) + gzip.compress(b"two"))
    assert b"".join(read_chunks(str(path), "gz")) == b"one two"
    frame = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # as pzstd writes before each frame
    path.write_bytes((frame + zstandard.ZstdCompressor().compress(b"text ")) * 2 + frame)
    assert compression_of(path.read_bytes()) == "zst"
    assert b"".join(read_chunks(str(path), "zst")) == b"text text "


def test_bzip2_streams_end_a_range(tmp_path):
    path = tmp_path / "many.bz2"
    packed = [bz2.compress(b"%d " % i * 1000) for i in range(6)]
    starts = [sum(map(len, packed[:i])) for i in range(7)]
    path.write_bytes(b"".join(packed))
    for start in range(0, starts[-1], 7):
        want = next((s for s in starts[:-1] if s >= start), None) if start else 0
        assert first_stream(str(path), start, starts[-1]) == want
    assert first_stream(str(path), starts[1] + 1, starts[2]) is None
    assert first_stream(str(path), starts[1] + 1, starts[2] + 1) == starts[2]
    for i in range(1, 6):
        edge = RangeEnd()
        data = b"".join(read_chunks(str(path), "bz2", starts[1], starts[i] + 1, edge))
        assert data == b"".join(b"%d " % j * 1000 for j in range(1, 6))
        assert edge.end == 2000 * i


RNG = random.Random(1)
WORDS = [RNG.randbytes(RNG.randint(2, 9)).hex().encode() for _ in range(5_000)]
TEXT = b" ".join(RNG.choices(WORDS, k=60_000))  # about 700 KB: eight blocks at level 1


@pytest.mark.parametrize("step", [3_001, 40_000, 1 << 20])
@pytest.mark.parametrize("pack", ["one stream", "streams", "zeros between"])
def test_bzip2_block_ranges_give_the_text(step, pack, tmp_path, monkeypatch):
    monkeypatch.setattr(decompress, "PLAIN_CHUNK", 10_007)
    path = tmp_path / "f.bz2"
    if pack == "one stream":
        packed = bz2.compress(TEXT, 1)
    else:
        zeros = bytes(5) if pack == "zeros between" else b""
        packed = b"".join(bz2.compress(TEXT[i : i + 99_999], 9) + zeros for i in range(0, len(TEXT), 99_999))
    path.write_bytes(packed)
    parts = [list(read_blocks(str(path), at, min(at + step, len(packed)))) for at in range(0, len(packed), step)]
    assert b"".join(block for part in parts for block in part) == TEXT
    if step == 40_000:
        assert sum(map(bool, parts)) > 3


def test_a_mark_is_found_at_every_bit():
    mark = decompress.BLOCK.to_bytes(6, "big")
    for shift in range(8):
        value = int.from_bytes(b"ab" + mark + b"cde", "big") << (8 - shift)
        data = value.to_bytes(12, "big")
        assert block_marks(data) == [(16 + shift, True)]
        assert block_marks(data[: 8 + (shift > 0)]) == [(16 + shift, True)] and not block_marks(data[: 7 + (shift > 0)])


def test_chance_mark_inside_a_block(tmp_path, monkeypatch):
    path = tmp_path / "f.bz2"
    path.write_bytes(bz2.compress(TEXT, 1))
    real = decompress.block_marks

    def more(data):
        found = real(data)
        return sorted([*found, *((bit + 7_777, True) for bit, _ in found[:1])])

    monkeypatch.setattr(decompress, "block_marks", more)
    assert b"".join(read_blocks(str(path), 0, 1 << 30)) == TEXT


@pytest.mark.parametrize("where", [0.3, 0.7])
def test_damage_is_named_after_what_came_before(where, tmp_path, monkeypatch):
    monkeypatch.setattr(decompress, "MOST_BLOCK", 8 * 200_000)
    path = tmp_path / "f.bz2"
    packed = bytearray(bz2.compress(TEXT, 1))
    at = int(where * len(packed))
    packed[at] ^= 0x40
    path.write_bytes(packed)
    found = []
    with pytest.raises(BadInput, match=r"f\.bz2: (damaged bz2 data|truncated).* in the block at byte \d+"):
        found += read_blocks(str(path), 0, len(packed))
    text = b"".join(found)
    assert TEXT.startswith(text) and len(text) > (where - 0.2) * len(TEXT)


def test_a_file_cut_short_is_named(tmp_path):
    path = tmp_path / "f.bz2"
    path.write_bytes(bz2.compress(TEXT, 1)[:-5_000])
    with pytest.raises(BadInput, match=r"f\.bz2: truncated: the bz2 stream ends early"):
        list(read_blocks(str(path), 0, 1 << 30))

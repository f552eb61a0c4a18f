"""Blocks of a bzip2 file, cut at any byte, are the file; what is damaged is said."""

import bz2
import random

import pytest

from data_prep.common.errors import BadInput
from data_prep.readers import decompress
from data_prep.readers.decompress import block_marks, read_blocks

RNG = random.Random(1)
WORDS = [RNG.randbytes(RNG.randint(2, 9)).hex().encode() for _ in range(5_000)]
TEXT = b" ".join(RNG.choices(WORDS, k=60_000))  # about 700 KB: eight blocks at level 1


@pytest.mark.parametrize("step", [3_001, 40_000, 1 << 20])
@pytest.mark.parametrize("pack", ["one stream", "streams", "zeros between"])
def test_ranges_of_any_size_give_the_text_once_and_in_order(step, pack, tmp_path, monkeypatch):
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


def test_a_mark_by_chance_inside_a_block_ends_nothing(tmp_path, monkeypatch):
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


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(decompress, "BOMB_BYTES", 1 << 20)
    path = tmp_path / "f.bz2"
    path.write_bytes(bz2.compress(bytes(20 << 20)))
    with pytest.raises(BadInput, match="unpacks to more than 200 times its size"):
        list(read_blocks(str(path), 0, 1 << 30))

"""What a compressed file unpacks to, and that a damaged or short one is never taken for whole."""

import bz2
import gzip
import lzma
import random

import pytest
import zstandard

from data_prep.problems import BadInput
from data_prep.streams import compression_of, read_chunks

PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
}
DATA = random.Random(1).randbytes(50_000) + b"line of text\n" * 400_000


@pytest.mark.parametrize("kind", PACK)
def test_a_stream_two_streams_and_padding_unpack_to_what_was_packed(kind, tmp_path):
    path = tmp_path / "file"
    packed = PACK[kind](DATA)
    assert compression_of(packed) == kind
    for content, want in (
        (packed, DATA),
        (packed + PACK[kind](b"tail"), DATA + b"tail"),
        (packed + b"\0" * 512, DATA),
    ):
        path.write_bytes(content)
        chunks = list(read_chunks(str(path), kind))
        assert b"".join(chunks) == want
        assert max(map(len, chunks)) <= 8 << 20


@pytest.mark.parametrize("kind", PACK)
def test_every_truncation_is_an_error_that_names_the_file(kind, tmp_path):
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


def test_a_bomb_costs_bounded_memory(tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(bytes(200 << 20)))
    assert max(len(chunk) for chunk in read_chunks(str(path), "gz")) <= 4 << 20
    path.write_bytes(zstandard.ZstdCompressor().compress(bytes(200 << 20)))
    assert max(len(chunk) for chunk in read_chunks(str(path), "zst")) <= 64 << 20

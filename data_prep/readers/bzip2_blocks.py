"""Blocks of a bzip2 file, found and unpacked one by one, so that several workers read one stream.

A block of at most 900 KB begins at any bit, with a mark of 48 bits, and depends on no other (the format is described in
Seward's bzip2 manual and, to the bit, in https://github.com/dsnet/compress/blob/master/doc/bzip2-format.pdf). Here it is put
into a stream of its own and given to libbz2, which checks its CRC-32; a block ends where the next mark is, or libbz2 says so.
"""

from __future__ import annotations

import bz2
from collections.abc import Iterator

from data_prep.common.errors import BadInput
from data_prep.readers.files import open_regular
from megabert.common.arrow_tables import BOMB_BYTES, BOMB_RATIO

BLOCK, END = 0x314159265359, 0x177245385090  # pi and the square root of pi in BCD
STEP = 1 << 20
MOST_BLOCK = 8 * (2 << 20)  # bits; what is longer is no block
FIVE_BYTES = (1 << 40) - 1
PATTERNS = [
    (mark, shift, (mark >> shift & FIVE_BYTES).to_bytes(5, "big")) for mark in (BLOCK, END) for shift in range(8)
]


def marks(data: bytes) -> list[tuple[int, bool]]:
    """(bit, whether a block begins there) of all marks that lie in `data` whole, in order."""
    found = []
    for mark, shift, pattern in PATTERNS:  # `shift` bits of the byte before the five are not the mark's
        at = data.find(pattern, 1)
        while at >= 0:
            window = int.from_bytes(data[at - 1 : at + 6].ljust(7, b"\0"), "big")
            complete = at + 5 + (shift > 0) <= len(data)
            if complete and window >> (8 - shift) & (1 << 48) - 1 == mark:
                found.append((8 * (at - 1) + shift, mark == BLOCK))
            at = data.find(pattern, at + 1)
    return sorted(found)


def _unpack(bits: bytes, first: int, last: int) -> bytes | None:
    """The text of the block in bits [first, last) of `bits`; None where it is none, or does not end there."""
    size = last - first
    value = int.from_bytes(bits[first // 8 : -(-last // 8)], "big") >> (-last % 8) & (1 << size) - 1
    checksum = value >> size - 80 & 0xFFFFFFFF  # that of a stream of one block is the block's
    value = ((value << 48 | END) << 32 | checksum) << (-size % 8)
    inner = bz2.BZ2Decompressor()
    try:
        text = inner.decompress(b"BZh9" + value.to_bytes(-(-size // 8) + 10, "big"))
    except (OSError, ValueError):
        return None
    return text if inner.eof else None


def read_blocks(path: str, start: int, stop: int) -> Iterator[bytes]:
    """The text of each block whose mark begins in bytes [start, stop) of a bzip2 file.

    Raises BadInput where a block is damaged, or the file ends inside one, or unpacks to more than BOMB_RATIO times its size.
    """
    with open_regular(path) as file:
        file.seek(start)
        data, base, seen = (b"", start, -1)  # `base`: the byte that `data` begins with; marks up to bit `seen` are done
        begin: int | None = None  # of the block that is open, a bit of the file
        unpacked = 0
        while new := file.read(STEP):
            data += new
            for place, is_block in marks(data):
                bit = 8 * base + place
                if bit <= seen:
                    continue
                seen = bit
                if begin is not None:
                    text = _unpack(data, begin - 8 * base, place)
                    if text is None:
                        continue  # a mark by chance, or damage: the length tells
                    unpacked += len(text)
                    if unpacked > max(BOMB_BYTES, BOMB_RATIO * (base + len(data) - start)):
                        raise BadInput(
                            f"{path}: unpacks to more than {BOMB_RATIO} times its size, as a decompression bomb does; "
                            "if it is real, unpack it first"
                        )
                    yield text
                    begin = None
                if bit >= 8 * stop:
                    return
                if is_block:
                    begin = bit
            keep = max(len(data) - 7, 0) if begin is None else begin // 8 - base
            if begin is not None and 8 * (base + len(data)) - begin > MOST_BLOCK:
                raise BadInput(f"{path}: damaged bz2 data in the block at byte {begin // 8}")
            if begin is None and base + keep > stop:
                return
            data, base = data[keep:], base + keep
        if begin is not None:
            raise BadInput(f"{path}: truncated: the bz2 stream ends early, in the block at byte {begin // 8}")

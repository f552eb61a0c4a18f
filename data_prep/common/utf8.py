"""Decoding of input as UTF-8."""

from __future__ import annotations

import re

from data_prep.common.errors import Problems
from data_prep.common.records import ReadOptions

# how an error calls invalid bytes
INVALID = (
    "invalid UTF-8; convert text of another encoding first (iconv -f windows-1252 -t utf-8, or by its name), or "
    "--encoding-errors replace"
)
# how it is counted with --encoding-errors replace
REPLACED = "invalid UTF-8 replaced"
# U+FFFD in UTF-8
REPLACEMENT = b"\xef\xbf\xbd"
# half of a surrogate pair, which JSON's escapes can name
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# a line, or a part of a longer one that ends behind a space or else between two characters
LINE = re.compile(rb"[^\n]{4096}[^\n ]{0,4096}(?: |[\x80-\xbf]{0,3})|[^\n]*\n|[^\n]+")


def without_invalid_lines(raw: bytes) -> tuple[bytes, list[bytes]]:
    """The text in which lines with invalid bytes, or such parts of long lines, are blank lines, and these lines."""
    kept, bad = [], []
    for line in LINE.findall(raw):
        try:
            line.decode()
            kept.append(line)
        except UnicodeDecodeError:
            bad.append(line)
            kept.append(b"\n")
    return b"".join(kept), bad


def decode(raw: bytes, options: ReadOptions, problems: Problems, path: str) -> str:
    """The text of UTF-8 bytes. Invalid ones become U+FFFD and are counted, or raise UnicodeDecodeError, by `options`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        if options.encoding_errors == "stop":
            raise
        text = raw.decode(errors="replace")
        problems.add(path, REPLACED, places=text.count("\ufffd") - raw.count(REPLACEMENT))
        return text

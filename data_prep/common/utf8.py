"""Decoding of input as UTF-8."""

from __future__ import annotations

from data_prep.common.errors import Problems
from data_prep.common.records import ReadOptions

# how an error calls invalid bytes
INVALID = "invalid UTF-8; convert text of another encoding first (iconv), or --encoding-errors replace"
# U+FFFD in UTF-8
REPLACEMENT = b"\xef\xbf\xbd"


def decode(raw: bytes, options: ReadOptions, problems: Problems) -> str:
    """The text of UTF-8 bytes. Invalid ones become U+FFFD and are counted, or raise UnicodeDecodeError, by `options`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        if options.encoding_errors == "stop":
            raise
        text = raw.decode(errors="replace")
        problems.counts["invalid UTF-8 replaced"] += text.count("\ufffd") - raw.count(REPLACEMENT)
        return text

"""Stream of decompressed bytes: the input of a splitter, from a range of a file or a member of an archive.

A splitter yields (place, text) of each document of a stream; a place is an offset in the decompressed text, or a line
number. It reports bad input through the stream's methods. Where a document begins and ends depends only on the bytes,
not on chunks or ranges. Memory is bounded, also for lines and documents that never end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from data_prep.common.errors import Problems
from data_prep.common.records import AUTO, ReadOptions

# bytes; longer lines are not text with sentences
MAX_LINE = 16 << 20
# most bytes of an element, a block or a record
MAX_DOCUMENT = 16 << 20
# bytes for the detection of a text format
HEAD = 1 << 16
SPACE = b" \t\r\n"
# the rule that drops records without text
NULL = "null value"
# the reason for records and tables without the field of texts
NO_FIELD = "no text field"
LONG_DOCUMENT, UNCLOSED = "long document", "unclosed document"

# (offset, bytes)
Slice = tuple[int, bytes]
Document = tuple[int, bytes | str]


@dataclass
class Stream:
    """`path` is the name in errors, `begin` the offset of the first byte of `chunks` in the text.

    Its documents are those that begin in [start, end); `end` is None for all, and for a range of a bzip2 file until it is reached.
    """

    path: str
    chunks: Iterator[bytes]
    options: ReadOptions
    problems: Problems
    format: str = AUTO
    # what a document is in plain text, of `records.TEXT_DOCUMENTS`
    kind: str = ""
    begin: int = 0
    start: int = 0
    end: int | None = None
    # whether it begins with its file, not with a later range of it
    first: bool = True
    # whether a document can begin with the first byte; else that document belongs to the range before
    synced: bool = True
    # of a range of a MediaWiki dump, the namespaces of links without text, which the head of the file says
    no_text: frozenset[str] | None = None

    def holds(self, offset: int) -> bool:
        """Whether what begins at `offset` belongs to the range."""
        return offset >= self.start and (self.end is None or offset < self.end)

    def end_at(self, offset: int) -> None:
        self.end = offset

    def bad(self, place: int, reason: str, detail: str, size: int = 0) -> None:
        self.problems.bad(self.path, place, reason, detail, size=size)

    def too_long(self, place: int, what: str, most: int, size: int = 0, reason: str = LONG_DOCUMENT) -> None:
        self.bad(place, reason, f"{what} longer than {most / 2**20:g} MiB", size)

    def lost(self, reason: str, size: int) -> None:
        """Count more bytes of a bad place."""
        self.problems.add(self.path, reason, size, places=0)

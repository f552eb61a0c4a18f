"""Where documents of plain text begin and end, decided once for a folder or an archive by a sample of its files.

For `--text-documents auto`. The first bytes of each sampled file look like one of these, and most files decide:

    heading     it begins with a heading of WikiText, ` = Title = `
    blank-line  most blocks between blank lines have several lines that are not wrapped, so a line is a sentence or a paragraph
                (CC-100, OSCAR, BERT's own input)
    line        there are no blank lines, and nearly all lines have several sentences
    file        anything else: blocks or lines are paragraphs of one document

Several files with few blocks or lines each are one document each, however they are laid out: a folder of articles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from data_prep.readers import formats
from data_prep.readers.decompress import PLAIN_CHUNK

# most files of a sample, and the bytes of all; documents may be long
SAMPLED_FILES, SAMPLED_BYTES = 32, 4 << 20
# files without plain text after which no more are sampled
OTHERS = 4
# fewer files do not show that each is a document
SEVERAL_FILES = 3
# blocks or lines in a file, in the median of several files, from which on they may be documents
MANY = 50
# blocks, and lines, from which on they may be documents
FEWEST_BLOCKS, FEWEST_LINES = 3, 20
# characters of the longest wrapped lines
WRAPPED = 120
BLANK = re.compile(r"\n\s*\n")
# an end of a sentence inside a line
INNER_END = re.compile(rf"[.!?…؟]{formats.CLOSERS}[ \t]|[。！？｡۔।॥։።။།]")


# what a document is, by kind
KINDS = {
    "file": "a file",
    "blank-line": "a block between blank lines",
    "line": "a line",
    "heading": "what follows a heading ` = Title = `",
}


class TextSample(NamedTuple):
    """The first bytes of a file of plain text, the bytes of its whole text (roughly), and whether `head` is all of it."""

    head: bytes
    size: int
    whole: bool

    @staticmethod
    def of(first: bytes, size: int, most: int) -> TextSample:
        """The sample of a file by its first chunk, or by all of it where that is below `most` bytes."""
        return TextSample(first[:most], size, whole=len(first) < most)


def sample_size(count: int) -> int:
    """Bytes of each of `count` sampled files."""
    return min(max(SAMPLED_BYTES // count, 1 << 16), PLAIN_CHUNK)


def decide(samples: Sequence[TextSample]) -> str:
    """The kind of documents in files of plain text: file, blank-line, line or heading."""
    seen = [_layout(sample) for sample in samples]
    votes = Counter(kind for kind, _ in seen)
    kind, files_of_kind = votes.most_common(1)[0] if votes else ("file", 0)
    if 2 * files_of_kind <= len(seen):
        return "file"
    few = len(seen) >= SEVERAL_FILES and median(documents for _, documents in seen) < MANY
    return "file" if few and kind != "heading" else kind


def _layout(sample: TextSample) -> tuple[str, float]:
    """(what the text of one file looks like, its blocks, or its lines if there are no blank lines between them)."""
    head = formats.with_line_feeds(sample.head, sample.head)
    texts = BLANK.split(head.decode(errors="replace").replace("\r", "").strip())
    if not sample.whole and len(texts) > 1:
        texts.pop()  # it may be cut anywhere
    blocks = [[line.rstrip() for line in text.split("\n")] for text in texts]
    lines = [line for block in blocks for line in block]
    scale = max(sample.size / max(len(head), 1), 1)
    if formats.HEADING_LINE.match(head.lstrip(b"\r\n\t ")):
        return "heading", len(blocks) * scale
    if len(blocks) < FEWEST_BLOCKS:
        several = sum(bool(INNER_END.search(line)) for line in lines)
        is_line = len(lines) >= FEWEST_LINES and several >= 0.9 * len(lines)
        return "line" if is_line else "file", len(lines) * scale
    multiple = [block for block in blocks if len(block) > 1]
    later = [line for block in multiple for line in block[1:]]  # the first may be a title
    lengths = sorted(len(line) for block in multiple for line in block)
    not_wrapped = 2 * len(multiple) >= len(blocks) and (
        lengths[len(lengths) * 9 // 10] > WRAPPED
        or sum(bool(formats.SENTENCE_END.search(line)) for line in later) >= 0.7 * len(later)
    )
    return "blank-line" if not_wrapped else "file", len(blocks) * scale

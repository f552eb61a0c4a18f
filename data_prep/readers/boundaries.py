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

import contextlib
import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from statistics import median
from typing import NamedTuple

from data_prep.common.errors import BadInput, refuse_failure
from data_prep.common.records import AUTO, Corpus, FileRange, RangeList, ReadOptions, find_folder, normalized
from data_prep.readers import archives, decompress, files
from data_prep.readers.archives import DamagedArchive
from data_prep.readers.decompress import PLAIN_CHUNK
from data_prep.readers.detection import BOM, detect, identify
from data_prep.readers.lines import CLOSERS, HEADING_LINE, SENTENCE_END, with_line_feeds
from data_prep.text.clean import BLANK_LINES
from megabert.common import storage

# most files of a sample, and the bytes of all; documents may be long
SAMPLED_FILES, SAMPLED_BYTES = 32, 4 << 20
# with fewer files, few blocks or lines in each do not prove that each file is a document
SEVERAL_FILES = 3
# with a median of fewer blocks or lines per file, each of several files is one document
MANY = 50
# a file with fewer blocks, or fewer lines, is not split into them
FEWEST_BLOCKS, FEWEST_LINES = 3, 20
# characters of the longest wrapped lines
WRAPPED = 120
# an end of a sentence inside a line
INNER_END = re.compile(rf"[.!?…؟]{CLOSERS}[ \t]|[。！？｡۔।॥։።။།]")
# unpacked bytes per compressed byte, a rough figure
EXPANSION = 4
# what a document is, by kind
KINDS = {
    "file": "a file",
    "blank-line": "a block between blank lines",
    "line": "a line",
    "heading": "what follows a heading ` = Title = `",
}


def describe_guess(where: str, kind: str) -> str:
    return f"{where}: a document of plain text is {KINDS[kind]}, by its first bytes; --text-documents decides otherwise"


class TextSample(NamedTuple):
    """The first bytes of a file of plain text, the bytes of its whole text (roughly), and whether `head` is all of it."""

    head: bytes
    size: int
    whole: bool


def text_documents(
    corpora: Sequence[Corpus], ranges: Sequence[RangeList], options: ReadOptions
) -> tuple[tuple[str, str], ...]:
    """(folder, kind of the documents in its files of plain text) for each folder that has any.

    A folder is an input with all that is below it, or has the file of an input or the matches of its glob.
    """
    if options.text_documents != AUTO:
        return ()
    inputs = list(dict.fromkeys(chain.from_iterable(corpus.paths for corpus in corpora)))
    urls = set(filter(storage.is_url, inputs))
    objects = {part.path for part in chain.from_iterable(ranges) if part.path in urls} if urls else set()
    folders = (posixpath.dirname(path) if path in objects else files.folder_of_input(path) for path in inputs)
    sampled: dict[str, list[FileRange]] = {normalized(folder): [] for folder in folders}
    seen, step = dict.fromkeys(sampled, 0), dict.fromkeys(sampled, 1)
    for part in chain.from_iterable(ranges):
        folder = find_folder(part.path, sampled)
        if folder is None or part.start or part.format not in (AUTO, "text"):
            continue
        if seen[folder] % step[folder] == 0:
            sampled[folder].append(part)
        seen[folder] += 1
        if len(sampled[folder]) > SAMPLED_FILES:  # every second one
            sampled[folder], step[folder] = sampled[folder][::2], 2 * step[folder]
    kinds = ((folder, decide_files(some, options)) for folder, some in sampled.items())
    return tuple((folder, kind) for folder, kind in kinds if kind)


def decide_files(some: Sequence[FileRange], options: ReadOptions) -> str:
    """The kind of documents in files, by those that are plain text; "" if none is. One that can't be read is reported by its reader."""
    samples: list[TextSample] = []
    for file in some:
        try:
            file = file if file.opened else identify(file, options)
            if file.format in (AUTO, "text"):
                first = next(decompress.read_chunks(file.path, file.compression), b"")
                size = file.size * (EXPANSION if file.compression else 1)
                samples += _samples(file.path, first, size, len(some), options, file.compression)
        except (BadInput, OSError) as error:  # reported by its reader, except for a failing disk or store
            refuse_failure(error, file.path)
    return decide(samples) if samples else ""


def decide_members(part: FileRange, options: ReadOptions) -> str:
    """The kind of documents in the members of an archive, by the first that are plain text."""
    samples: list[TextSample] = []
    with contextlib.suppress(DamagedArchive):
        for name, size, open_member in islice(archives.members(part), SAMPLED_FILES):
            with contextlib.suppress(BadInput), open_member() as content:
                first = next(archives.chunks(name, content, size), b"")
                samples += _samples(name, first, len(first), SAMPLED_FILES, options)
    return decide(samples)


def _samples(
    path: str, first: bytes, size: int, sampled: int, options: ReadOptions, compression: str = ""
) -> list[TextSample]:
    """The sample of a file by its first chunk, one of `sampled` files; none if it is not plain text."""
    if not first or detect(path, first, options, compression) != "text":
        return []
    most = min(max(SAMPLED_BYTES // sampled, 1 << 16), PLAIN_CHUNK)
    return [TextSample(first[:most], size, whole=len(first) < most)]


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
    head = with_line_feeds(sample.head, sample.head).removeprefix(BOM)
    texts = BLANK_LINES.split(head.decode(errors="replace").replace("\r", "").strip())
    if not sample.whole and len(texts) > 1:
        texts.pop()  # it may be cut anywhere
    blocks = [[line.rstrip() for line in text.split("\n")] for text in texts]
    lines = [line for block in blocks for line in block]
    scale = max(sample.size / max(len(head), 1), 1)
    if HEADING_LINE.match(head.lstrip(b"\r\n\t ")):
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
        or sum(bool(SENTENCE_END.search(line)) for line in later) >= 0.7 * len(later)
    )
    return "blank-line" if not_wrapped else "file", len(blocks) * scale

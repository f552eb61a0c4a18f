"""Records of the input: a corpus has inputs, a task pieces of files, a piece documents."""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"
TABLES = ("parquet", "arrow")
TEXT_DOCUMENTS = (AUTO, "file", "blank-line", "line")
FORMATS = ("text", "wiki", "mediawiki", "jsonl", *TABLES)


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents. `text_documents` is auto | file | blank-line | line; `encoding` auto or a codec.

    `text_field` is as `megabert.common.fields` takes it, `split` the part of a saved dataset that is read, or "all".
    """

    format: str = AUTO
    text_documents: str = AUTO
    text_field: str = "text"
    keep_titles: bool = False
    encoding: str = AUTO
    split: str = "train"

    @staticmethod
    def choices(name: str) -> tuple[str, ...]:
        """What the option of that name may be; () for any text."""
        return {"format": (AUTO, *FORMATS), "text_documents": TEXT_DOCUMENTS}.get(name, ())


@dataclass(frozen=True)
class Corpus:
    """Inputs (files, folders, globs or the word pydoc) that belong together, and how often they are read.

    `read`, `filters` (as `--filters` takes them) and `languages` are its own; None: those of the build.
    """

    name: str
    paths: tuple[str, ...]
    weight: float = 1.0
    read: ReadOptions | None = None
    filters: tuple[str, ...] | None = None
    languages: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a file: its bytes, its bzip2 streams that start in its bytes, its row groups or batches [start, end).

    All of it when `end` is None. `format` may be "auto" where only opening or unpacking tells. With `index`, a name in the
    work folder, [start, end) are bytes of the unpacked text, which that index says where to find (`readers.unpacked`).
    """

    path: str
    compression: str = ""
    format: str = AUTO
    start: int = 0
    end: int | None = None
    size: int = 0  # bytes on disk, for the progress bar
    encoding: str = AUTO
    stamp: tuple[int, int] | None = None  # (bytes, time of the last change in ns) of the file when it was planned
    opened: bool = True  # False: planned by its name and size alone
    documents: str = ""  # what a document is in a text file, once its opening was seen: file or blank-line
    told: bool = True  # whether the opening says so, or the rule for what can't be told
    stream: bool = False  # a large file that is unpacked before it can be cut
    index: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    index: int
    pieces: tuple[Piece, ...]
    corpus: int = 0  # its place among the corpora

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Document:
    """One document as read. `text` is str when a parser already decoded it, else UTF-8 bytes to be checked.

    `offset` is in bytes of the unpacked (and recoded) file, for a table a row. In a range of a bzip2 file it counts
    from the first stream of the range, which `path` then names after the file.
    """

    path: str
    offset: int
    text: bytes | str
    markup: bool

"""Tasks of reading: the input cut into ranges of files for workers.

The tasks and their order depend only on the input. A task is several small files of one corpus, one compressed file, or a range of
a large one. A document belongs to the range of its file with its first byte (for bzip2: its stream). A large file that can't be
read from any position is unpacked first and cut like a plain file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path

from data_prep.common.errors import EMPTY, BadInput, Problems, add_losses, refuse_failure
from data_prep.common.records import (
    AUTO,
    PYDOC,
    TABLES,
    UNCUT,
    Corpus,
    FileRange,
    RangeList,
    ReadOptions,
    ReadTask,
    source_names,
)
from data_prep.readers import archives, decompress, detection, documents, files, pydoc_corpus, tables
from data_prep.readers.boundaries import EXPANSION
from data_prep.readers.decompress import BOMB_BYTES, BOMB_RATIO
from data_prep.readers.elements import ELEMENTS
from megabert.common import storage
from megabert.common.logs import log
from megabert.common.streaming import in_order

# bytes of text in a range of a divided file
RANGE_BYTES = 32 << 20
# largest unpacked size of a compressed file in one task, in RANGE_BYTES
MOST_UNCUT = 3
# positions of a bzip2 file where a stream is searched
PROBES = 4
# smallest and largest bytes of text in a task, estimated by the size on disk
TASK_BYTES = (4 << 20, 64 << 20)
# number of tasks above which they become larger
TASKS = 16_384
# files smaller than this (compressed: a quarter of it) whose suffix is in NAMED are planned without opening them
SMALL = 4 << 20
NAMED = {".txt": "", ".text": "", ".jsonl": "", ".ndjson": "", ".arrow": "", ".parquet": "", **decompress.SUFFIXES}
# files in a call of a thread
LISTED_AT_ONCE = 256
# bytes of text in a file of UNCUT, which is one task: its tokens are in memory together and have 32-bit places
MAX_UNCUT = 4 << 30
# threads that wait for the file system
THREADS = 16
# files of a corpus for the estimate of its unpacked bytes
RATIO_FILES = 8

# the path without links, its ranges, its problems, and its bytes of text if one worker has to read it
PlannedFile = tuple[str, list[FileRange], Problems, float]


def list_ranges(
    corpora: Sequence[Corpus], options: ReadOptions, problems: Problems, outputs: Sequence[str | Path] = ()
) -> list[RangeList]:
    """The ranges of all files of each corpus in order. A file named twice is read once. Empty files are counted and
    skipped. If one of the build's `outputs` lies inside an input folder or a glob's, its files are skipped.

    Raises BadInput naming the file that can't be read.
    """
    seen, notices = files.SeenFiles(), files.InputNotices()
    files.real_folder.cache_clear()
    own = {files.start_of(output): output for output in outputs}
    several = bool(source_names(corpora))

    def corpus_ranges(number: int, corpus: Corpus) -> Iterator[FileRange]:
        planned: Iterator[PlannedFile]
        for place, item in enumerate(corpus.paths):
            source = (number if len(corpora) > 1 else place) if several else 0
            if item == PYDOC and not os.path.exists(item):
                modules = (FileRange(path, format=PYDOC, size=size) for path, size in pydoc_corpus.files())
                planned = ((os.path.realpath(module.path), [module], Problems("skip"), 0.0) for module in modules)
            else:
                paths = files.expand(item, problems, notices)
                folder = files.folder_of_input(item)
                if inside := tuple(start for start in own if start[:-1].startswith(files.start_of(folder))):
                    if folder == item:
                        log.info(f"--input {item}: all but {own[inside[0]]}, the folder of this build")
                    paths = (path for path in paths if not files.real_path(path).startswith(inside))
                planned = _plan_all(paths, options, problems.policy)
            for real, parts, its_problems, size in planned:
                if seen.add(real):
                    _refuse_large(parts, size, max(1.0, corpus.weight))
                    problems.counts += its_problems.counts
                    add_losses(problems.lost, its_problems.lost)
                    yield from (replace(part, source=source) for part in parts)
                else:
                    notices.count("repeated", real)

    ranges = [RangeList(corpus_ranges(number, corpus)) for number, corpus in enumerate(corpora)]
    notices.log()
    return ranges


def _plan_all(paths: Iterator[str], options: ReadOptions, policy: str) -> Iterator[PlannedFile]:
    """Results of `_plan_file` for all paths, in order."""
    some = iter(lambda: list(islice(paths, LISTED_AT_ONCE)), [])
    plan = partial(_plan_file, options, policy)
    return chain.from_iterable(in_order(lambda names: list(map(plan, names)), some, THREADS, 2 * THREADS))


def _plan_file(options: ReadOptions, policy: str, path: str) -> PlannedFile:
    """The ranges of one file; none if it is empty or bad. Raises BadInput."""
    problems = Problems(policy)
    ranges: list[FileRange] = []
    size = 0
    try:
        size, changed = files.status(path)
        whole = FileRange(path, format=options.format, size=size, stamp=(size, changed))
        suffix = os.path.splitext(storage.public(path))[1]
        small = min(SMALL, RANGE_BYTES // EXPANSION)
        if not size:
            problems.add(path, EMPTY)
        elif suffix in NAMED and size < (small // EXPANSION if NAMED[suffix] else small):
            format_ = suffix[1:] if suffix[1:] in TABLES and options.format == AUTO else options.format
            ranges = [replace(whole, compression=NAMED[suffix], format=format_, opened=False)]
        else:
            file = _unpack_first(detection.identify(whole, options), options)
            if file.format == detection.INDEX:
                problems.add(path, detection.INDEX)
            else:
                ranges = _cut_file(file)
    except BadInput as error:
        if policy == "stop":
            raise
        problems.add(path, documents.REASONS.get(type(error), documents.DAMAGED), size)
    except OSError as error:
        problems.unreadable(path, error)
    return files.real_path(path), ranges, problems, max(map(_uncut_size, ranges), default=0.0)


def _unpack_first(file: FileRange, options: ReadOptions) -> FileRange:
    """The file; a large compressed one has its format, and is marked if it has to be unpacked before it is cut."""
    most = MOST_UNCUT * RANGE_BYTES
    if not file.compression or file.format == "tar":
        return file
    # small by the usual ratio; a few files pack much better, but more than BOMB_RATIO is refused
    if _is_small(file) and (max(BOMB_BYTES, BOMB_RATIO * file.size) <= most or _ratio(file) * file.size <= most):
        return file
    first = next(decompress.read_chunks(file.path, file.compression), b"")
    file = replace(file, format=detection.detect(file.path, first, options, file.compression))
    return replace(file, unpack_first=file.format not in UNCUT and not _can_be_cut(file))


def _is_small(file: FileRange) -> bool:
    return file.size <= RANGE_BYTES // EXPANSION * 3 // 2


def _can_be_cut(file: FileRange) -> bool:
    """Whether ranges of a compressed file are even: of a large bzip2 file with streams that begin everywhere."""
    if _is_small(file) or file.compression != "bz2" or file.format not in ELEMENTS:
        return False
    step = RANGE_BYTES // EXPANSION
    places = (1 + i * (file.size - 1) // PROBES for i in range(PROBES))
    return all(decompress.first_stream(file.path, at, min(at + step, file.size)) is not None for at in places)


def _cut_file(file: FileRange) -> list[FileRange]:
    if file.unpack_first or file.format in (AUTO, *UNCUT):
        return [file]
    if file.format not in TABLES:
        return cut(file, file.size)
    parts = max(file.size // RANGE_BYTES, 1)
    if file.format == "arrow" and parts == 1:
        return [file]
    if not (count := tables.count_parts(file)):
        return [file]
    edges = sorted({i * count // parts for i in range(parts + 1)})
    return [
        replace(file, start=a, end=b, size=file.size * b // count - file.size * a // count) for a, b in pairwise(edges)
    ]


def cut(file: FileRange, size: int) -> list[FileRange]:
    """Ranges of a file of `size` bytes that can be read from any position."""
    step = RANGE_BYTES // (EXPANSION if file.compression and not file.index else 1)
    if size <= step * 3 // 2:
        return [replace(file, size=size)]
    edges = [*range(0, size - step // 2, step), size]
    return [replace(file, start=a, end=b, size=b - a) for a, b in pairwise(edges)]


def _uncut_size(part: FileRange) -> float:
    """Bytes of text of a file of UNCUT, estimated for a compressed one; 0 for others."""
    if part.format not in UNCUT or not part.opened:
        return 0.0
    return part.size * (_ratio(part) if _is_packed(part) else 1)


def _refuse_large(parts: Sequence[FileRange], size: float, weight: float) -> None:
    """Raises BadInput for a file of UNCUT whose `size` of text, in all its copies, is above MAX_UNCUT."""
    if size * weight > MAX_UNCUT:
        copies = f" {weight:g} times" * (weight > 1)
        raise BadInput(
            f"{parts[0].path}: has about {size / 2**30:.1f} GiB of text{copies}; one worker reads a {parts[0].format} file and "
            f"holds its tokens in memory, so split it into files of at most {MAX_UNCUT >> 30} GiB"
        )


def group(ranges: Sequence[RangeList]) -> list[ReadTask]:
    """Tasks of the ranges of each corpus, in order; adjacent small ones are combined."""
    total = sum(map(_weight, chain.from_iterable(ranges)))
    size = min(max(total // TASKS, TASK_BYTES[0]), TASK_BYTES[1])
    tasks: list[ReadTask] = []
    for corpus, its_ranges in enumerate(ranges):
        members: list[FileRange] = []
        weight = 0
        for number, part in enumerate(its_ranges, 1):
            members.append(part)
            weight += _weight(part)
            if weight >= size or number == len(its_ranges):
                tasks.append(ReadTask(len(tasks), RangeList(members), corpus))
                members, weight = [], 0
    return tasks


def _weight(part: FileRange) -> int:
    return part.size * (EXPANSION if _is_packed(part) else 1)


def _is_packed(part: FileRange) -> bool:
    """Whether a range has more bytes of text than of its file."""
    return part.format in ("parquet", "zip") or bool(part.compression and not part.index)


def unpacked_bytes(tasks: Sequence[ReadTask]) -> int:
    """Unpacked bytes of the files of tasks, by the ratio of the first bytes of some compressed ones."""
    packed = RangeList(part for task in tasks for part in task.ranges if _is_packed(part))
    size = sum(task.size for task in tasks)
    if not packed:
        return size
    tried = list(islice(packed, 0, None, -(-len(packed) // RATIO_FILES)))
    ratio = sum(map(_ratio, tried)) / len(tried)
    return round(size + (ratio - 1) * packed.size)


def _ratio(part: FileRange) -> float:
    """Unpacked bytes per byte of a file on disk; EXPANSION if it can't be read, which its reader reports."""
    try:
        if part.format == "parquet":
            return tables.ratio(part.path)
        if part.format == "zip":
            return archives.names_and_size(part.path)[1] / max(part.size, 1)
        with files.open_regular(part.path) as file:
            return decompress.ratio(file, part.compression) or EXPANSION
    except (BadInput, OSError) as error:
        refuse_failure(error, part.path)
        return EXPANSION

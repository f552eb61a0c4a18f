"""Documents as used for the sequences: cleaned, filtered, without duplicates, in Parquet files that a build can read.

Columns: `text`, `source` (the file), `document` (byte or row in it), `tokens` (number of kept tokens).
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.common.errors import printable
from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Stage, Stages
from data_prep.executor.work_files import DOCUMENT, BuildJob, ItemResult, Writer
from data_prep.tokens.encoder import Encoded
from megabert.common.files import write_whole

FOLDER = "text"
PART = "part-{:07d}.parquet"
# kept documents and tokens by file
BY_SOURCE = "sources.csv"
# work files of a task, read-TASK.NAME: UTF-8 of its sentences, their sizes, and the places of its documents
NAMES = ("texts", "text-sizes", "places")
PLACE = np.dtype([("source", "<u4"), ("document", "<u8")])


@dataclass(frozen=True)
class SavedTask:
    """A task whose documents to write, the mask that applies to it ("" | keep | trim), and its files."""

    task: int
    mask: str
    sources: tuple[str, ...] = field(repr=False)
    folder: str = field(repr=False)


def write(
    files: Mapping[str, Writer], numbers: dict[str, int], places: Sequence[tuple[str, int]], encoded: Encoded
) -> None:
    """Append to the work files documents read at `places`, (file, document) each; `numbers` are those of the task's files."""
    assert encoded.texts is not None
    texts = encoded.texts.cast(pa.binary())
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    rows = [(numbers.setdefault(path, len(numbers)), document) for path, document in places]
    for name, array in zip(NAMES, (data[ends[0] : ends[-1]], np.diff(ends), np.array(rows, PLACE)), strict=True):
        files[name].write(array)


def run(stages: Stages, job: BuildJob, tasks: list[SavedTask], folder: Path) -> Stage:
    """Write the documents of all tasks, and BY_SOURCE, to `folder`, and remove parts of the input before a resume."""
    (folder / FOLDER).mkdir(exist_ok=True)
    kept: dict[str, list[int]] = {}
    stage = stages.map("texts", save, job, tasks)
    output_folder.remove_others(folder / FOLDER, PART.replace("{:07d}", "*"), stage.results)
    for result in stage.results:
        for source, *counts in result.facts["sources"]:
            kept[source] = [a + b for a, b in zip(kept.get(source, [0, 0]), counts, strict=True)]
    table = io.StringIO()
    rows = ((source, *kept[source]) for source in sorted(kept, key=lambda source: (-kept[source][1], source)))
    csv.writer(table, lineterminator="\n").writerows([("source", "documents", "tokens"), *rows])
    write_whole(folder / BY_SOURCE, table.getvalue().encode())
    return stage


def save(job: BuildJob, item: SavedTask) -> ItemResult:
    """Write text/part-TASK.parquet if any document of the task remains; the fact "sources": (file, documents, tokens)."""
    import pyarrow.parquet as parquet

    result = ItemResult()
    stem = f"read-{item.task:07d}"
    sources = list(map(printable, item.sources))
    documents = work_files.read(job, f"{stem}.documents", DOCUMENT)
    lengths = work_files.read(job, f"{stem}.sentences", "uint32").astype(np.int64)
    data, sizes = work_files.read(job, f"{stem}.texts", "uint8"), work_files.read(job, f"{stem}.text-sizes", "int32")
    places = work_files.read(job, f"{stem}.places", PLACE)
    edges = np.append(0, np.cumsum(sizes, dtype=np.int64))
    texts = pa.LargeStringArray.from_buffers(len(sizes), pa.py_buffer(edges), pa.py_buffer(data))
    left = Encoded(np.repeat(np.arange(len(lengths)), lengths), lengths, documents["sentences"].astype(np.int64), texts)
    if item.mask:
        left = left.select_sentences(work_files.read(job, f"{item.mask}-{item.task:07d}.mask", "bool"))
    keep = left.document_sizes > 0
    left, places = left.select(keep), places[keep]
    tokens = left.document_tokens()
    used, documents_of = np.unique(places["source"], return_counts=True)
    tokens_of = np.bincount(places["source"], tokens, len(sources)).astype(int)
    result.facts["sources"] = [
        (sources[i], n, int(tokens_of[i])) for i, n in zip(used.tolist(), documents_of.tolist(), strict=True)
    ]
    if len(tokens):
        columns = {
            "text": left.document_texts(), "source": pa.array(sources).take(pa.array(places["source"])),
            "document": pa.array(places["document"]), "tokens": pa.array(tokens, pa.uint32()),
        }  # fmt: skip
        path = Path(item.folder, FOLDER, PART.format(item.task))
        with io.BytesIO() as file:
            parquet.write_table(pa.table(columns), file, compression="zstd")
            write_whole(path, file.getvalue())
        result.files[os.path.relpath(path, job.work)] = work_files.checksum(path)
    return result

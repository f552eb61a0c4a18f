"""Documents as used for the sequences: cleaned, filtered, without duplicates, in Parquet files that a build can read.

Columns: `text`, `source` (the file), `document` (byte or row in it), `tokens` (number of kept tokens).
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import Append, BuildJob, ItemResult
from data_prep.stages.kept import DOCUMENT, KeptDocuments
from data_prep.tokens.encoder import Encoded
from megabert.common.files import write_atomically

FOLDER = "text"
PART = "part-{:07d}.parquet"
# kept documents and tokens by file
BY_SOURCE = "sources.csv"
# work files of a task, read-TASK.NAME: UTF-8 of its sentences, their sizes, and the places of its documents
NAMES = ("texts", "text-sizes", "places")
PLACE = np.dtype([("source", "<u4"), ("document", "<u8")])


def write(
    files: Mapping[str, Append], numbers: dict[str, int], places: Sequence[tuple[str, int]], encoded: Encoded
) -> None:
    """Append to the work files documents read at `places`, (file, document) each; `numbers` are those of the task's files."""
    assert encoded.texts is not None
    texts = encoded.texts.cast(pa.binary())
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    rows = [(numbers.setdefault(path, len(numbers)), document) for path, document in places]
    for name, array in zip(NAMES, (data[ends[0] : ends[-1]], np.diff(ends), np.array(rows, PLACE)), strict=True):
        files[name](array)


def run(stages: Stages, job: BuildJob, kept: list[KeptDocuments]) -> None:
    """Write the documents of all tasks and BY_SOURCE to the output; deletes parts that a changed input made stale."""
    folder = Path(job.output, FOLDER)
    folder.mkdir(exist_ok=True)
    saved = stages.map("texts", save, job, kept)
    output_folder.remove_others(folder, PART.replace("{:07d}", "*"), saved)
    documents: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for result in saved:
        for source, its_documents, its_tokens in result.facts["sources"]:
            documents[source] += its_documents
            tokens[source] += its_tokens
    table = io.StringIO()
    rows = ((source, documents[source], tokens[source]) for source in sorted(tokens, key=lambda s: (-tokens[s], s)))
    csv.writer(table, lineterminator="\n").writerows([("source", "documents", "tokens"), *rows])
    write_atomically(Path(job.output, BY_SOURCE), table.getvalue().encode())


def save(job: BuildJob, part: KeptDocuments) -> ItemResult:
    """Write text/part-TASK.parquet if any document of the task remains; the fact "sources": (file, documents, tokens)."""
    import pyarrow.parquet as parquet

    result, sources = ItemResult(), list(part.sources)

    def read(name: str, dtype: np.dtype | str) -> np.ndarray:
        return work_files.read(job, f"read-{part.task:07d}.{name}", dtype)

    documents, lengths = read("documents", DOCUMENT), read("sentences", "uint32").astype(np.int64)
    data, sizes, places = read("texts", "uint8"), read("text-sizes", "int32"), read("places", PLACE)
    edges = np.append(0, np.cumsum(sizes, dtype=np.int64))
    texts = pa.LargeStringArray.from_buffers(len(sizes), pa.py_buffer(edges), pa.py_buffer(data))
    # in place of tokens, which are not needed, sentence numbers
    every = Encoded(
        np.repeat(np.arange(len(lengths)), lengths), lengths, documents["sentences"].astype(np.int64), texts
    )
    left = every.select_sentences(part.read_mask(job, len(lengths)))
    remains = left.document_sizes > 0
    left, places = left.select(remains), places[remains]
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
        path = Path(job.output, FOLDER, PART.format(part.task))
        with io.BytesIO() as file:
            parquet.write_table(pa.table(columns), file, compression="zstd")
            write_atomically(path, file.getvalue())
        work_files.record_output(job, path, result)
    return result

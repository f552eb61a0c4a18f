"""What the readers make of files, in the order in which a build would see it; files, archives and folders as bytes."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from dataclasses import replace

import pytest
import zstandard

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.readers import boundaries, tasks
from data_prep.readers.documents import read_documents

PACK = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def write(path, content):
    """`path`, a file of these bytes or this text, whose folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_all(folder, files):
    """`folder` with files by their names."""
    for name, content in files.items():
        write(folder / name, content)
    return folder


def write_table(path, table, rows=700):
    """`path`, a table of row groups or batches of `rows` in the format that its name says: Parquet, Feather, Arrow with or without footer."""
    import pyarrow.feather
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, str(path))
    else:
        make = pyarrow.ipc.new_file if path.name.startswith("footer") else pyarrow.ipc.new_stream
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def records(texts):
    """JSON lines of these texts."""
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def archive(kind, members):
    """Bytes of a zip or tar archive of members by their names; a tar archive ends with a link."""
    data = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(data, "w") as packed:
            for name, content in members.items():
                packed.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # without a date
        return data.getvalue()
    with tarfile.open(fileobj=data, mode="w") as packed:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(link)
    return data.getvalue()


def contents(folder):
    """Bytes of every file of a folder by its relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def plan(inputs, problems=None, **options):
    """Tasks of one corpus of these inputs."""
    return tasks.group(_listed(inputs, problems or Problems("stop"), ReadOptions(**options))[1])


def _listed(inputs, problems, options):
    corpora = [Corpus("input", tuple(str(path) for path in inputs))]
    return corpora, tasks.list_ranges(corpora, options, problems)


def read_all(inputs, policy="stop", **options):
    """(texts, problems) of every document of the inputs, in order."""
    problems, options = Problems(policy), ReadOptions(**options)
    corpora, ranges = _listed(inputs, problems, options)
    options = replace(options, folders=boundaries.text_documents(corpora, ranges, options))
    found = []
    for task in tasks.group(ranges):
        for part in task.ranges:
            for document in read_documents(part, options, problems):
                text = document.text
                found.append(text if isinstance(text, str) else text.decode())
    return found, problems


def refuse(path, message, error=BadInput, **options):
    """(texts, problems) of a file under `skip`, which is refused under `stop`."""
    with pytest.raises(error, match=message):
        read_all([path], **options)
    return read_all([path], "skip", **options)

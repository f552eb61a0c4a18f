"""What the readers make of files, in the order in which a build would see it; compressions; the bytes of a folder."""

import bz2
import gzip
import lzma
from dataclasses import replace

import zstandard

from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.readers import tasks
from data_prep.readers.documents import read_documents

PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


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
    options = replace(options, folders=tasks.text_documents(corpora, ranges, options))
    found = []
    for task in tasks.group(ranges):
        for part in task.ranges:
            for document in read_documents(part, options, problems):
                text = document.text
                found.append(text if isinstance(text, str) else text.decode())
    return found, problems

"""Entries of the lists of URLs to drop, as an index that every reader of documents looks URLs up in."""

from __future__ import annotations

import functools
import os

import numpy as np

from data_prep.common.errors import Unfinished
from data_prep.executor import work_files
from data_prep.executor.work_files import Done, Job
from data_prep.filters.url_lists import WITH_URL, WITHOUT_URL, ListedUrls, UrlList
from megabert.common.logs import log

REASON = "listed URL"  # why a document was dropped
INDEX = "urls.keys"


def index(job: Job, lists: tuple[UrlList, ...]) -> Done:
    """Write urls.keys: uint64 [n], ascending, of all entries."""
    done = Done()
    keys = np.unique(np.concatenate([listed.keys() for listed in lists]))
    work_files.write(job, INDEX, keys, done)
    return done


def opened(job: Job) -> ListedUrls:
    """The index that `index` wrote."""
    status = os.stat(job.path(INDEX))
    return _opened(job.path(INDEX), (status.st_ino, status.st_mtime_ns))


@functools.lru_cache(maxsize=1)
def _opened(path: str, identity: tuple[int, int]) -> ListedUrls:
    # Read and not mapped: it is kept for the life of the process, and NFS removes no folder with an open file in it.
    return ListedUrls(np.fromfile(path, "<u8"))


def check(read: Done, field: str, allow: bool) -> None:
    """Raises Unfinished where no document that was read has a URL: the lists dropped nothing and never could."""
    if read.counts[WITH_URL] or not read.counts[WITHOUT_URL]:
        return
    said = f"--drop-urls: none of {read.counts[WITHOUT_URL]:,} documents has a URL in its field {field!r}"
    if not allow:
        raise Unfinished(f"{said}; --url-field names another (with --overwrite), --allow goes on without")
    log.warning(said)

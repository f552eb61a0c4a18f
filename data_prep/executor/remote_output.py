"""Output of a build in a store: built in a local folder, shards uploaded as they are written, manifests last.

The local folder is that of an output of the same name, resumes as such, and is removed when all of it is in the store.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.common.errors import BadInput
from data_prep.executor import output_folder
from megabert.common import storage
from megabert.common.files import cache_folder, files_below
from megabert.common.logs import log
from megabert.data.shards import MANIFEST


def local_folder(url: str) -> Path:
    """The folder in which the dataset at `url` is built: in $XDG_CACHE_HOME/megabert/builds or ~/.cache/…"""
    return cache_folder("builds") / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


def is_done(url: str, account: dict[str, Any], seq_lens: tuple[int, ...], overwrite: bool) -> bool:
    """Whether the datasets of `account` are complete there. Of others, with `overwrite`, the manifests are removed, so that a dataset
    is never mixed; else raises BadInput."""
    found = storage.below(url)
    manifests = [name for name in found if os.path.basename(name) == MANIFEST]
    if not manifests:
        foreign = [name for name in found if not output_folder.OURS.fullmatch(name.partition("/")[0])]
        if foreign:
            raise BadInput(f"--output {url}: holds {foreign[0]}, which is not of a build; name another place")
        return False
    changed = "without its account"
    if output_folder.ACCOUNT in found:
        old = json.loads(storage.read(storage.join(url, output_folder.ACCOUNT)))
        changed = "; ".join(output_folder.differences(old, account))
    if not changed:
        places = output_folder.folders(Path(), seq_lens).values()
        return all((place / MANIFEST).as_posix() in found for place in places)
    if not overwrite:
        raise BadInput(f"--output {url}: holds a dataset of another build ({changed}); --overwrite replaces it")
    for name in sorted(manifests, key=len):  # a dataset's before that of its held-out part
        storage.remove(storage.join(url, name))
    return False


def publish(url: str, folder: Path, progress: bool) -> None:
    """Upload what is not there yet, manifests last, and remove what is of no file; then remove the local folder."""
    files = files_below(folder)
    there = {name: each.size for name, each in storage.below(url).items()}
    last = sorted((name for name in files if os.path.basename(name) == MANIFEST), key=len, reverse=True)
    missing = [name for name, path in files.items() if there.get(name) != path.stat().st_size or path.suffix != ".tar"]
    size = sum(files[name].stat().st_size for name in missing)
    with tqdm(total=size, unit="B", unit_scale=True, desc="upload", disable=None if progress else True) as bar:
        for name in [name for name in missing if name not in last] + last:
            storage.put(files[name], storage.join(url, name))
            bar.update(files[name].stat().st_size)
    for name in there.keys() - files.keys():
        storage.remove(storage.join(url, name))
    shutil.rmtree(folder)
    log.info(f"{url}: {len(files)} files, the manifest last")

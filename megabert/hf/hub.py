"""Folders of models: runs, Hugging Face folders, and models of the hub by name, through `huggingface_hub` and its cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from megabert.common import storage
from megabert.common.errors import Failed
from megabert.common.files import atomic_folder, cache_folder, lock
from megabert.common.hub_upload import NAME
from megabert.common.logs import log
from megabert.common.run_files import BESIDE, BEST, IN_CHECKPOINT, holds_checkpoint

UNUSED = 86_400.0  # seconds after which an older copy of a URL's model is removed
# weight files of a Hugging Face model, preferred format first
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
WEIGHT_SUFFIXES = (".safetensors", ".bin")
INDEX = ".index.json"  # suffix of the index of sharded weights
# files of a repository with safetensors that a model is read from
FILES = ("*.json", "vocab.txt", "merges.txt", "*.model", "model.safetensors", "model-*.safetensors")


def model_folder(source: str | Path) -> Path:
    """The folder of a model: `source`, or the hub's repository of that name (google-bert/bert-base-uncased) in the hub's cache,
    downloaded if it is missing there, or of a URL its copy (`download_folder`).

    Its files are not opened. A name whose first part is a local folder is a wrong path and not looked up. Raises ValueError for
    anything else, Failed if the hub cannot be reached.
    """
    path = download_folder(os.fspath(source)) if storage.is_url(source) else Path(source)
    if path.is_dir():
        # `best` of a fine-tuning run is a model too
        if not (is_model_folder(path) or holds_checkpoint(path) or is_model_folder(path / "best")):
            raise ValueError(
                f"{source}: no checkpoint in it, so it is not a run folder; no {' or '.join(WEIGHT_FILES)}, so it is not a "
                "Hugging Face folder"
            )
        return path
    if path.exists() or not NAME.fullmatch(str(source)) or path.parent.is_dir():
        raise ValueError(
            f"{source}: no such folder; name a run folder, one of its checkpoints, a Hugging Face folder, or a model of the "
            "hub as OWNER/NAME"
        )
    return download(str(source))


def refuse_finetuned(path: Path, source: str | Path) -> None:
    """Raises ValueError for the folder of a fine-tuned model, which has no head that predicts words."""
    if any((folder / "task.json").is_file() for folder in (path, path / "best")):
        raise ValueError(
            f"{source}: is a fine-tuned model; predict with megabert finetune --predict, export it with megabert export, or "
            "train it on another task with megabert finetune"
        )


def download_folder(url: str, weights: bool = True) -> Path:
    """Download the model folder at `url`, or a run's newest complete checkpoint with the run's other files, into the
    cache (`cache_folder`); returns the local folder. `weights` false: only the other files. Raises ValueError if there
    is neither."""
    found = storage.list_objects(url)
    steps = [match[1] for match in map(IN_CHECKPOINT.fullmatch, found) if match and match[2] == "manifest.json"]
    newest = max(steps, default="") if weights else ""
    files = {
        name: each
        for name, each in found.items()
        if BESIDE.fullmatch(name) or (name.startswith((f"checkpoints/{newest}/", f"{BEST}/")) if newest else weights)
    }
    names = [folder + name + end for folder in ("", f"{BEST}/") for name in WEIGHT_FILES for end in ("", INDEX)]
    if weights and not newest and files.keys().isdisjoint(names):
        raise ValueError(
            f"{url}: not a model: it has no complete checkpoint of a run and no {' or '.join(WEIGHT_FILES)}"
        )
    of_url = cache_folder("models") / hashlib.sha256(f"{url.rstrip('/')} {weights}".encode()).hexdigest()[:16]
    folder = of_url / hashlib.sha256(repr(sorted(files.values())).encode()).hexdigest()[:16]
    of_url.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(of_url, os.O_RDONLY)
    try:
        # of several processes, as ranks, one copies
        lock(descriptor, of_url, "do not start a second process that copies it", wait=True)
        if not folder.is_dir():
            megabytes = sum(each.size for each in files.values()) / 1e6
            log.info(f"{url}: copying {newest or 'model'} ({megabytes:,.0f} MB) to {folder}")
            with atomic_folder(folder, "") as temporary:
                for name, each in files.items():
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    checked = Path(name).suffix in WEIGHT_SUFFIXES  # a run's checkpoints have checksums
                    try:
                        before = storage.stat(each.url) if checked else None
                        storage.fetch(each.url, temporary / name)
                        after = storage.stat(each.url) if checked else None
                    except FileNotFoundError as error:  # by a run that trains
                        raise Failed(f"{error.filename}: was removed while it was copied; start again") from None
                    if after != before:
                        raise ValueError(f"{each.url}: changed while it was copied; wait until it is complete")
        os.utime(folder)
        for older in of_url.iterdir():
            if older != folder and older.stat().st_mtime < time.time() - UNUSED:  # others may still read it
                shutil.rmtree(older, ignore_errors=True)
    finally:
        os.close(descriptor)
    return folder


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has weights under Hugging Face's names, in one file or several."""
    return bool(weights_in(folder))


def weights_in(folder: Path, names: Sequence[str] = WEIGHT_FILES) -> list[Path]:
    """Files of weights in a folder, or the indexes that name several, in the order of `names`."""
    paths = [folder / name for file in names for name in (file, file + INDEX)]
    return [path for path in paths if path.is_file()]


def download(name: str) -> Path:
    """The folder of a repository's files in the hub's cache. Raises as `model_folder`."""
    from huggingface_hub import HfApi, errors, snapshot_download

    missing = f"{name}: no such folder, and the hub"
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(FILES)))
        if not weights_in(folder, WEIGHT_FILES[:1]):
            folder = Path(snapshot_download(name, allow_patterns=[*FILES, WEIGHT_FILES[1], "pytorch_model-*.bin"]))
        if not weights_in(folder):
            HfApi().model_info(name)  # without the hub the library returns what its cache has, as a tokenizer's files
            raise ValueError(f"{missing} has no {' and no '.join(WEIGHT_FILES)} of that name")
        return folder
    except errors.LocalEntryNotFoundError as error:
        why = f" ({storage.first_line(error.__cause__)})" if error.__cause__ else ""
        raise Failed(f"{missing} cannot be reached to look for a model of that name{why}") from None
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code not in (401, 403, 404):
            raise Failed(f"{missing} answers with {error.response.status_code}") from None
        reason = "has no public model of that name"
        if isinstance(error, errors.GatedRepoError):
            raise ValueError(f"{name}: no such folder, and {storage.GATED}") from None
        raise ValueError(f"{missing} {reason}") from None
    except Exception as error:
        # the library raises a bare OSError for a file that lacks bytes
        if not (storage.is_client_error(error) or (isinstance(error, OSError) and error.errno is None)):
            raise
        raise Failed(f"{missing} cannot be reached ({type(error).__name__}: {storage.first_line(error)})") from None

"""Folders of models: runs, Hugging Face folders, and models of the hub by name, through `huggingface_hub` and its cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from megabert.common import storage
from megabert.common.errors import Failed
from megabert.common.files import appearing, cache_folder, lock
from megabert.common.logs import log
from megabert.common.run_files import BEST, IN_CHECKPOINT, holds_checkpoint

# OWNER/NAME
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# of a Hugging Face folder: safetensors, and the older form
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# ending of the file that names the files of weights, where they are several
INDEX = ".index.json"
# files of a repository with safetensors that a model is read from
FILES = ("*.json", "vocab.txt", "merges.txt", "*.model", "model.safetensors", "model-*.safetensors")


def model_folder(source: str | Path) -> Path:
    """The folder of a model: `source`, or the hub's repository of that name (google-bert/bert-base-uncased) in the hub's cache,
    downloaded if it is missing there, or of a URL its copy (`copied`).

    Its files are not opened. A name whose first part is a local folder is a wrong path and not looked up. Raises ValueError for
    anything else, Failed if the hub cannot be reached.
    """
    path = copied(os.fspath(source)) if storage.is_url(source) else Path(source)
    if path.is_dir():
        # `best` of a fine-tuning run is a model too
        if not (is_model_folder(path) or holds_checkpoint(path) or is_model_folder(path / "best")):
            raise ValueError(
                f"{source}: no checkpoint in it, so it is not a run folder; no {' or '.join(WEIGHTS)}, so it is not a "
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


def copied(url: str, weights: bool = True) -> Path:
    """A copy of a model's folder in a store, or of a run's newest whole checkpoint and files beside it (without `weights` these alone),
    in $XDG_CACHE_HOME/megabert or ~/.cache/megabert. Raises ValueError where there is neither."""
    found = storage.below(url)
    steps = [match[1] for match in map(IN_CHECKPOINT.fullmatch, found) if match and match[2] == "manifest.json"]
    newest = max(steps, default="") if weights else ""
    files = {
        name: each
        for name, each in found.items()
        if not name.startswith("lock/") and ((match := IN_CHECKPOINT.fullmatch(name)) is None or match[1] == newest)
    }
    names = [folder + name + end for folder in ("", f"{BEST}/") for name in WEIGHTS for end in ("", INDEX)]
    if weights and not newest and files.keys().isdisjoint(names):
        raise ValueError(f"{url}: no run with a whole checkpoint, and no {' or '.join(WEIGHTS)}, so no model is there")
    of_url = cache_folder("models") / hashlib.sha256(f"{url.rstrip('/')} {weights}".encode()).hexdigest()[:16]
    folder = of_url / hashlib.sha256(repr(sorted(files.values())).encode()).hexdigest()[:16]
    of_url.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(of_url, os.O_RDONLY)
    try:
        # of several processes, as ranks, one copies
        lock(descriptor, of_url, "start no second process that copies it", wait=True)
        if not folder.is_dir():
            log.info(
                f"{url}: {newest or 'model'} of {sum(each.size for each in files.values()) / 1e6:,.0f} MB is copied to {folder}"
            )
            with appearing(folder, "") as temporary:
                for name, each in files.items():
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    storage.fetch(each.url, temporary / name)
            for older in of_url.iterdir():
                if older != folder:
                    shutil.rmtree(older, ignore_errors=True)
    finally:
        os.close(descriptor)
    return folder


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has weights under Hugging Face's names, in one file or several."""
    return bool(weights_in(folder))


def weights_in(folder: Path, names: Sequence[str] = WEIGHTS) -> list[Path]:
    """Files of weights in a folder, or the indexes that name several, in the order of `names`."""
    paths = [folder / name for file in names for name in (file, file + INDEX)]
    return [path for path in paths if path.is_file()]


def download(name: str) -> Path:
    """The folder of a repository's files in the hub's cache. Raises as `model_folder`."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(FILES)))
        if not weights_in(folder, WEIGHTS[:1]):
            folder = Path(snapshot_download(name, allow_patterns=[*FILES, WEIGHTS[1], "pytorch_model-*.bin"]))
        return folder
    except errors.LocalEntryNotFoundError:
        raise Failed(
            f"{name}: no such folder, and the hub cannot be reached to look for a model of that name"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        denied = isinstance(error, errors.GatedRepoError)
        reason = "asks for access: `hf auth login`" if denied else "has no model of that name, or none that is public"
        raise ValueError(f"{name}: no such folder, and the hub {reason}") from None
    except Exception as error:
        if not storage.is_of_client(error):
            raise
        raise Failed(
            f"{name}: no such folder, and the hub cannot be reached ({type(error).__name__}: {error})"
        ) from None

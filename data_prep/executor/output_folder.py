"""Output folder of a build: empty, unfinished or complete; a complete dataset is only replaced with --overwrite.

Unfinished means a work folder with `build.json`, the account of what is being built. A build with the same account resumes
there; a complete dataset with the same account is left as it is; any other account is refused with the differences.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput, Unfinished
from data_prep.executor.journal import write_json
from megabert.common.errors import describe
from megabert.common.files import lock
from megabert.common.logs import log
from megabert.data.shards import MANIFEST
from megabert.data.tokenizer import CONFIG

WORK = ".work"
HELD_OUT = "held_out"
ACCOUNT = "build.json"
REPORT = "report.json"
TOKENIZERS = {"sentencepiece": "tokenizer.model", "wordpiece": "vocab.txt"}
# the entry of an account in which an unfinished build may differ: what it read is checked item by item
FILES = "input files"


def folders(output: Path, seq_lens: tuple[int, ...]) -> dict[int, Path]:
    """Folder of the dataset of each row length: `output` itself where there is one, else seqN in it."""
    return {n: output if len(seq_lens) == 1 else output / f"seq{n}" for n in seq_lens}


def _is_ours(path: Path) -> bool:
    name = path.name
    if path.is_dir():
        return name in (WORK, HELD_OUT) or (name.startswith("seq") and name[3:].isdigit())
    if name.startswith(("shard-", ".shard-", ".manifest", ".build", ".report")):
        return name.endswith((".tar", ".tmp"))
    return name in (MANIFEST, ACCOUNT, REPORT, *TOKENIZERS.values(), CONFIG)


def clear(output: Path) -> None:
    """Remove the files of a build, manifests first, so that no dataset is ever mixed.

    The account is removed last: after a kill it still marks the folder as one of a build, whose work folder is not resumed.
    """
    for path in sorted(output.rglob(MANIFEST)):
        path.unlink()
    account = output / ACCOUNT
    if (unfinished := output / WORK / ACCOUNT).exists():
        os.replace(unfinished, account)
    for path in sorted(output.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif _is_ours(path) and path != account:
            path.unlink()
    account.unlink(missing_ok=True)


def differences(old: dict[str, Any], new: dict[str, Any], name: str = "") -> Iterator[str]:
    """Differences between two accounts, one text each."""
    for key in sorted(old.keys() | new.keys()):
        label = f"{name}{key.replace('_', ' ')}"
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{label}: ")
        elif a != b:
            yield f"{label} was {a}, is {b}"


def _load(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise BadInput(f"{path}: not valid JSON; --overwrite starts again") from None


def _is_complete(output: Path, seq_lens: tuple[int, ...]) -> bool:
    return (output / ACCOUNT).is_file() and all(
        (folder / MANIFEST).is_file() for folder in folders(output, seq_lens).values()
    )


def _is_done(output: Path, account: dict[str, Any], seq_lens: tuple[int, ...]) -> bool:
    """Whether `output` holds the complete dataset of `account`. Raises BadInput where it holds another one."""
    if not _is_complete(output, seq_lens) or (output / WORK / ACCOUNT).exists():
        return False
    if changed := list(differences(_load(output / ACCOUNT), account)):
        raise BadInput(
            f"--output {output}: holds a dataset of another build ({'; '.join(changed)}); --overwrite replaces it"
        )
    return True


def _refuse_foreign(output: Path) -> None:
    """Raises BadInput for files that are not of a dataset; where no build was, for any file."""
    paths = sorted(output.iterdir())
    for path in paths:
        if not _is_ours(path):
            raise BadInput(f"--output {output}: holds {path.name}, which is not of a dataset; name another folder")
    if _was_built_in(output):
        return
    for path in paths:
        if path.suffix != ".tmp":
            raise BadInput(
                f"--output {output}: holds {path.name} and neither a dataset nor an unfinished build; name another folder"
            )


def _was_built_in(output: Path) -> bool:
    """Whether a folder holds a work folder, the account of a build, or a manifest whose account was not copied with it."""
    marks = (output / WORK, output / ACCOUNT, output / MANIFEST)
    return any(path.exists() for path in marks) or any(output.glob(f"seq*/{MANIFEST}"))


def _refuse_sources(output: Path, sources: Iterable[str]) -> None:
    """Raises BadInput where a file that a build reads lies in the folder that it may have to clear."""
    top = os.path.join(os.path.realpath(output), "")
    # real paths of folders: an input has millions of files in few of them
    real: dict[str, str] = {}
    for path in sources:
        folder, name = os.path.split(path)
        if folder not in real:
            real[folder] = os.path.realpath(folder)
        if os.path.join(real[folder], name).startswith(top):
            raise BadInput(
                f"--output {output}: the build would replace {path}, which it reads; copy that elsewhere, and name the copy"
            )


def _refuse_others(output: Path, unfinished: dict[str, Any], account: dict[str, Any]) -> None:
    if changed := list(differences(unfinished, account)):
        raise BadInput(
            f"--output {output}: holds an unfinished build with other options ({'; '.join(changed)}); "
            "give those to resume it, or --overwrite to start again"
        )


def _is_unfinished(output: Path, account: dict[str, Any]) -> bool:
    """Whether `output` holds an unfinished build of `account`."""
    try:
        unfinished = json.loads((output / WORK / ACCOUNT).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return not any(differences({**unfinished, FILES: account[FILES]}, account))


def _prepare(
    output: Path, account: dict[str, Any], seq_lens: tuple[int, ...], overwrite: bool, sources: Iterable[str]
) -> bool:
    """Prepare `output`: empty but for its work folder, new or the one to resume. False when the dataset is complete.

    With `overwrite` an unfinished build of the same account was started by the same command, and is resumed.
    """
    _refuse_foreign(output)
    if not overwrite and _is_done(output, account, seq_lens):
        if (output / WORK).exists():  # killed while removing it
            _remove_work(output)
        return False
    _refuse_sources(output, sources)
    if overwrite and not _is_unfinished(output, account):
        clear(output)
    unfinished = output / WORK / ACCOUNT
    if unfinished.exists():
        _refuse_others(output, {**_load(unfinished), FILES: account[FILES]}, account)
        write_json(unfinished, account)
        return True
    _refuse_dataset(output)
    clear(output)
    (output / WORK).mkdir()
    write_json(unfinished, account)
    return True


def _refuse_dataset(output: Path) -> None:
    if list(output.rglob(MANIFEST)):
        raise BadInput(f"--output {output}: already holds a dataset; --overwrite replaces it")


def _remove_work(output: Path) -> None:
    """Remove the work folder of a complete dataset. On NFS a file that some process still has open stays, as `.nfs…`."""
    try:
        shutil.rmtree(output / WORK)
    except OSError as error:
        log.warning(f"the dataset is complete, but {describe(error)}: remove {output / WORK} by hand")


@contextlib.contextmanager
def alone(work: Path) -> Iterator[None]:
    """Run one of several jobs that share a work folder at a time; the others wait."""
    with open(work / "lock", "w") as file:
        lock(file.fileno(), work / "lock", "start its parts one after another", wait=True)
        yield


@contextlib.contextmanager
def joined(
    output: Path, account: dict[str, Any], seq_lens: tuple[int, ...], sources: Iterable[str] = ()
) -> Iterator[Path | None]:
    """The work folder of a build whose parts several jobs read, at the same time or not; None when it is complete.

    Nothing is removed: the job that merges, which is `opened`, does that. Raises BadInput where a whole build is running
    there, or the account is not that of the other parts.
    """
    output.mkdir(parents=True, exist_ok=True)
    handle = os.open(output, os.O_RDONLY)
    try:
        try:
            lock(handle, output, "start no whole build there", shared=True)
        except BlockingIOError:
            raise BadInput(f"--output {output}: another build is writing there, not a part") from None
        _refuse_foreign(output)
        if _is_done(output, account, seq_lens):
            yield None
            return
        _refuse_sources(output, sources)
        (output / WORK).mkdir(exist_ok=True)
        unfinished = output / WORK / ACCOUNT
        with alone(output / WORK):
            if unfinished.exists():
                _refuse_others(output, _load(unfinished), account)
            else:
                _refuse_dataset(output)
                write_json(unfinished, account)
        yield output / WORK
    finally:
        os.close(handle)


@contextlib.contextmanager
def opened(
    output: Path, account: dict[str, Any], seq_lens: tuple[int, ...], overwrite: bool, sources: Iterable[str] = ()
) -> Iterator[Path | None]:
    """The work folder of the build of `account`, or None when it is complete. One build at a time.

    `sources` are the files that the build reads: none may lie in `output`, which may be cleared.

    When the build ends, the work folder is removed and the account stays. After BadInput, which the user corrects by other
    options, nothing stays; after any other error (a full disk, an interruption, a bug) the same command resumes the build.
    """
    if output.exists() and not output.is_dir():
        raise BadInput(f"--output {output}: is a file; name a folder")
    created = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    handle = os.open(output, os.O_RDONLY)
    try:
        try:
            lock(handle, output, "start no second build there")
        except BlockingIOError:
            raise BadInput(f"--output {output}: another build is writing there") from None
        if not _prepare(output, account, seq_lens, overwrite, sources):
            yield None
            return
        try:
            yield output / WORK
        except Unfinished:
            raise
        except BadInput:
            clear(output)
            if created:
                output.rmdir()
            raise
        (output / WORK / ACCOUNT).unlink()  # first, so that a partly removed work folder is not resumed
        _remove_work(output)
    finally:
        os.close(handle)

"""Output of a build: empty, unfinished or complete; a complete dataset is only replaced with --overwrite.

`build.json` holds the account of a build: its options and input files. While a build is unfinished it lies in the work
folder, with the versions of the code. A build with the same account and code resumes it; a complete dataset with the
same account is left unchanged; anything else is refused, listing the differences.

Output to a URL is built in a local folder; shards are uploaded as they are written, and manifests last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.common.errors import BadInput, Unfinished
from data_prep.common.records import JOURNAL, UNPACK
from data_prep.executor.journal import write_json
from data_prep.executor.work_files import ItemResult
from data_prep.readers import files as input_files
from megabert.common import storage
from megabert.common.environment import source, version
from megabert.common.errors import describe
from megabert.common.files import cache_folder, canonical, files_below, lock
from megabert.common.logs import log
from megabert.data.shards import MANIFEST

WORK, LOCK = ".work", "lock"
HELD_OUT = "held_out"
ACCOUNT = "build.json"
REPORT = "report.json"
SPOOLS = "stream-*.zst"  # files of UNPACK
TOKENIZERS = {"sentencepiece": "tokenizer.model", "wordpiece": "vocab.txt"}
# folders and packages whose versions are in the account of an unfinished build
CODE, PACKAGES = ("data_prep", "megabert/data"), ("numpy", "pyarrow", "rensa", "sentencepiece", "tokenizers")
# account entry that may change before a resume, since the key of each finished item has its files' sizes and times
FILES = "input files"
# entry of an unfinished build that may change too
ON_ERROR = "on error"
# file names that builds write; a folder with any other file is refused
OURS = re.compile(
    r"\.work|held_out|seq\d+|\.?shard-.*\.(tar|tmp)|\.(manifest|build|report).*\.tmp|(manifest|build|report)\.json|"
    r"tokenizer\.(model|json)|vocab\.txt|tokenizer_config\.json|text|sources\.csv"
)
# names that no other folder has, unlike `text` and `vocab.txt`
BUILT = re.compile(r"(build|manifest)\.json|shard-.*\.tar")


def folders(output: Path, seq_lens: Sequence[int]) -> dict[int, Path]:
    """Folder of the dataset of each row length: `output` for a single one, else seqN in it."""
    return {n: output if len(seq_lens) == 1 else output / f"seq{n}" for n in seq_lens}


def local_folder(url: str) -> Path:
    """The folder in which the dataset at `url` is built: in $XDG_CACHE_HOME/megabert/builds or ~/.cache/…"""
    return cache_folder("builds") / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


@contextlib.contextmanager
def opened(
    output: Path,
    account: dict[str, Any],
    overwrite: bool = False,
    sources: Iterable[str] = (),
    part: bool = False,
    on_error: str = "skip",
    url: str = "",
) -> Iterator[Path | None]:
    """The work folder of the build of `account`, or None if the dataset is complete. One build at a time, or several jobs that each
    read a `part`. `sources` are the input files: none may be in `output`, which may be cleared. `url`: where its content goes.

    When the build ends, the work folder is removed and the account is kept. After BadInput, which the user corrects by other
    options, unpacked text is kept; after any other error (a full disk, an interruption, a bug) the same command resumes the build.
    A job that reads a part removes nothing of its build; the merging build does that.
    """
    created, work = not output.exists(), output / WORK
    with _locked(output, shared=part):
        if _is_built(output, account, overwrite, on_error, url):
            if work.exists() and not part:  # the process that completed the build was killed while deleting it
                _remove_work(work)
            yield None
            return
        _refuse_sources(output, sources)
        if part:
            work.mkdir(exist_ok=True)
            with alone(work):
                _begin(output, account, overwrite, on_error, part)
            yield work
            return
        _begin(output, account, overwrite, on_error, part)
        for folder in (output, work, *(work / JOURNAL).glob("*/")):
            for path in folder.glob(".*.tmp"):  # of processes that were killed
                path.unlink()
        try:
            yield work
        except Unfinished:
            raise
        except BadInput:
            clear(output)
            with contextlib.suppress(OSError, ValueError):  # the mistake is what the user has to know
                _remove_objects(url, storage.list_objects(url) if url else ())
            if work.exists():
                log.warning(f"{work}: keeps the unpacked text for the corrected command")
            elif created and not any(output.iterdir()):
                output.rmdir()
            raise
        (work / ACCOUNT).unlink()  # first, so that a partly removed work folder is not resumed
        _remove_work(work)


@contextlib.contextmanager
def alone(work: Path) -> Iterator[None]:
    """Lock a work folder shared by several jobs; the others wait."""
    with open(work / LOCK, "w") as file:
        lock(file.fileno(), work / LOCK, "start its parts one after another", wait=True)
        yield


@contextlib.contextmanager
def _locked(output: Path, shared: bool = False) -> Iterator[None]:
    """Lock the folder of an output, created if missing. Raises BadInput if another process has locked it."""
    if output.exists() and not output.is_dir():
        raise BadInput(f"--output {output}: is a file; name a folder")
    output.mkdir(parents=True, exist_ok=True)
    handle = os.open(output, os.O_RDONLY)
    try:
        try:
            lock(handle, output, "do not start a second build there", shared=shared)
        except BlockingIOError:
            raise BadInput(f"--output {output}: another build is writing there") from None
        _refuse_foreign(output)
        yield
    finally:
        os.close(handle)


def _is_built(output: Path, account: dict[str, Any], overwrite: bool, on_error: str, url: str) -> bool:
    """Whether nothing is to be built: the dataset is complete, with `overwrite` one of the same command whose upload to `url` was
    interrupted. Raises BadInput for another one without `overwrite`."""
    if overwrite and not url:
        return False
    try:
        if done := _is_done(output, account):
            _refuse_skipped(output, on_error)
    except BadInput:
        if overwrite:
            return False
        raise
    return done


def _is_done(output: Path, account: dict[str, Any]) -> bool:
    """Whether `output` has the complete dataset of `account`. Raises BadInput for another dataset."""
    manifests = [folder / MANIFEST for folder in folders(output, account["options"]["seq_len"]).values()]
    if not all(path.is_file() for path in (output / ACCOUNT, *manifests)) or (output / WORK / ACCOUNT).exists():
        return False
    if changed := _changes((output / ACCOUNT).read_bytes(), output / ACCOUNT, account):
        raise BadInput(f"--output {output}: holds a dataset of another build ({changed}); --overwrite replaces it")
    return True


def _refuse_skipped(output: str | Path, on_error: str) -> None:
    """Raises BadInput for a complete dataset without the bad input that --on-error skip dropped, if `on_error` is stop."""
    if on_error != "stop":
        return
    report = storage.join(os.fspath(output), REPORT)
    facts = json.loads(storage.read(report) if storage.is_url(report) else Path(report).read_bytes())
    if facts.get("lacks_bad_input"):
        raise BadInput(
            f"{report}: the dataset lacks bad input, which --on-error skip dropped; give it again, or --overwrite"
        )


def _begin(output: Path, account: dict[str, Any], overwrite: bool, on_error: str, part: bool) -> None:
    """Create the work folder of the build of `account`, or check that an existing one belongs to it.

    With `overwrite` an unfinished build of the same account was started by the same command, and is resumed. Jobs that each read a
    `part` must have the same files too.
    """
    unfinished = output / WORK / ACCOUNT
    account = account | {"code": code(), ON_ERROR: on_error}
    if unfinished.exists():
        written = unfinished.read_bytes()
        changed = _changes(written, unfinished, account, but=(ON_ERROR,) if part else (FILES, ON_ERROR))
        if not changed:
            if _changes(written, unfinished, account):
                # Manifests written before a kill are not of the shards that follow, and tasks of other files, or those that stop
                # where they skipped, may need unpacked text that was deleted after it had been read.
                for path in (*_manifests(output), output / WORK / JOURNAL / f"{UNPACK}.json"):
                    path.unlink(missing_ok=True)
            write_json(unfinished, account)
            return
        if not overwrite and (part or _has_results(output / WORK)):
            raise BadInput(
                f"--output {output}: holds an unfinished build with other options or code ({changed}); use those to resume it, "
                "or --overwrite to start again"
            )
    if not overwrite and _manifests(output):
        raise BadInput(f"--output {output}: already holds a dataset; --overwrite replaces it")
    clear(output, part)  # a part, too: no other one has begun, and a build may have been killed while it cleared
    (output / WORK).mkdir(exist_ok=True)
    write_json(unfinished, account)


def _manifests(output: Path) -> list[Path]:
    """The manifests in a folder, in the order to remove them: a dataset's before that of its held-out part."""
    return sorted(output.rglob(MANIFEST), key=lambda path: len(path.parts))


def _has_results(work: Path) -> bool:
    """Whether items of an unfinished build are finished, other than unpacked text, which other options can use."""
    return any(path.parent.name != UNPACK and path.stem != UNPACK for path in (work / JOURNAL).rglob("*.json"))


def code() -> dict[str, str | None]:
    """Digest of the source files, and versions of the packages, on which the bytes of a dataset depend."""
    return {"source": source(*CODE)[:16]} | {name: version(name) for name in PACKAGES}


def _changes(data: bytes, where: str | Path, account: dict[str, Any], but: tuple[str, ...] = ()) -> str:
    """How the account `data`, which is at `where`, differs from `account` in other entries than `but`, "" if it does not."""
    try:
        old = json.loads(data)
    except ValueError:
        return f"{where} is not valid JSON"
    return "; ".join(differences(old | {name: account[name] for name in but}, account))


def differences(old: dict[str, Any], new: dict[str, Any], name: str = "") -> Iterator[str]:
    """Differences between two accounts, a string each."""
    for key in sorted(old.keys() | new.keys()):
        label = f"{name}{key.replace('_', ' ')}"
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{label}: ")
        elif a != b:
            yield f"{label} was {a}, is {b}"


def _refuse_foreign(output: Path) -> None:
    """Raises BadInput for files that are not of a build, or for any file if there was no build."""
    paths = sorted(output.iterdir())  # once: another part may begin meanwhile
    was_built = any(path.name in (WORK, ACCOUNT, MANIFEST) for path in paths) or any(output.glob(f"seq*/{MANIFEST}"))
    for path in paths:
        if not (was_built and OURS.fullmatch(path.name)) and (path.suffix != ".tmp" or path.is_dir()):
            raise BadInput(f"--output {output}: holds {path.name}, which no build wrote; name another folder")


def _refuse_sources(output: str | Path, sources: Iterable[str]) -> None:
    """Raises BadInput if an input file is in the folder that a build may have to clear."""
    top = input_files.start_of(output)
    for path in sources:
        if input_files.real_path(path).startswith(top):
            raise BadInput(
                f"--output {output}: the build would replace {path}, which it reads; copy that elsewhere, and name the copy"
            )


def clear(output: Path, part: bool = False) -> None:
    """Delete the files of a build except for unpacked text, and the lock that a `part` holds; manifests first, so that no dataset mixes
    two builds.

    The account goes last: after a kill it still marks the folder as that of a build, which is not resumed.
    """
    work, account = output / WORK, output / ACCOUNT
    # with the manifests the records of complete stages, whose files may be deleted
    for path in (*_manifests(output), *(work / JOURNAL).glob("*.json")):
        path.unlink()
    if (work / ACCOUNT).exists():
        os.replace(work / ACCOUNT, account)
    for path in sorted(output.iterdir()):
        if path == work and (part or any((work / JOURNAL / UNPACK).glob("*.json"))):
            for inner in (*work.iterdir(), *(work / JOURNAL).glob("*")):
                if inner.name not in (LOCK, JOURNAL, UNPACK) and not inner.match(SPOOLS):
                    shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
        elif OURS.fullmatch(path.name) and path != account:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    account.unlink(missing_ok=True)


def remove_others(folder: Path, pattern: str, results: Sequence[ItemResult], unfinished: str = ".*.tmp") -> None:
    """Delete stale files in `folder`: those that match `pattern` but belong to none of `results` (the input changed
    before a resume), and temporary files of killed processes, which match `unfinished`. In a work folder that other
    jobs may be writing to, `unfinished` must match only this stage's files."""
    kept = {os.path.basename(name) for result in results for name in result.files}
    for path in (*folder.glob(pattern), *folder.glob(unfinished)):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def _remove_work(work: Path) -> None:
    """Remove the work folder of a complete dataset. On NFS a file that a process still has open remains as `.nfs…`."""
    try:
        shutil.rmtree(work)
    except OSError as error:
        log.warning(f"the dataset is complete, but {describe(error)}: remove {work} by hand")


def prepare_url(
    url: str, account: dict[str, Any], overwrite: bool, on_error: str = "skip", sources: Iterable[str] = ()
) -> bool:
    """Prepare `url` for the upload of a build; returns False if its datasets are already complete there, without `overwrite`.

    Mutates the store: it deletes all objects of another build, with `overwrite`, or of an unfinished one of other files,
    manifests first, and it writes build.json, before any shard, since `publish` skips a shard of the same size. Raises
    BadInput for another build without `overwrite`, for `sources` there, for objects that no build wrote, and while another
    process of this machine builds or uploads there.
    """
    found, folder = storage.list_objects(url), local_folder(url)
    changed = "without its account" if found else ""
    if ACCOUNT in found:
        place = storage.join(url, ACCOUNT)
        written = storage.read(place)
        changed = _changes(written, place, account)
        unfinished = not any(os.path.basename(name) == MANIFEST for name in found)
        # as in a folder: a build that this machine began and that has no results gives way to other options
        without_results = len(found) == 1 and (folder / WORK / ACCOUNT).exists() and not _has_results(folder / WORK)
        same_options = unfinished and not _changes(written, place, account, but=(FILES,))
        overwrite = overwrite or without_results or same_options
    places = folders(Path(), account["options"]["seq_len"]).values()
    if not changed and all((place / MANIFEST).as_posix() in found for place in places):
        if not overwrite:
            _refuse_skipped(url, on_error)
            return False
        changed = "complete"
    _refuse_sources(url, sources)
    was_built = any(BUILT.fullmatch(os.path.basename(name)) for name in found)
    if foreign := [name for name in found if not (was_built and OURS.fullmatch(name.partition("/")[0]))]:
        raise BadInput(f"--output {url}: holds {foreign[0]}, which no build wrote; name another URL")
    if changed and not overwrite:
        raise BadInput(f"--output {url}: holds a build with other options or code ({changed}); --overwrite replaces it")
    with _locked(folder) if folder.exists() else contextlib.nullcontext():
        if changed:  # the account is replaced last
            _remove_objects(url, found.keys() - {ACCOUNT})
        if changed or not found:
            storage.write(storage.join(url, ACCOUNT), canonical(account))
    return True


def _remove_objects(url: str, names: Iterable[str]) -> None:
    """Delete objects of a build: a dataset's manifest before that of its held-out part and before shards, the account last. Others, which
    came while it ran, stay."""
    ours = (name for name in names if OURS.fullmatch(name.partition("/")[0]))
    for name in sorted(ours, key=lambda name: (name == ACCOUNT, os.path.basename(name) != MANIFEST, len(name))):
        storage.remove(storage.join(url, name))


def publish(url: str, folder: Path, progress: bool) -> None:
    """`upload` outside of `opened`. Raises BadInput if another process of this machine has locked `folder`."""
    with _locked(folder):
        upload(url, folder, progress)


def upload(url: str, folder: Path, progress: bool) -> None:
    """Upload the missing files of `folder`, manifests last, delete other objects of builds at `url`, then delete `folder`.

    Does nothing if another process has uploaded it meanwhile.
    """
    files = files_below(folder)
    if ACCOUNT not in files:  # uploaded and deleted by another process
        shutil.rmtree(folder)
        return
    there = {name: each.size for name, each in storage.list_objects(url).items()}
    last = sorted((name for name in files if os.path.basename(name) == MANIFEST), key=len, reverse=True)
    missing = [name for name, path in files.items() if there.get(name) != path.stat().st_size or path.suffix != ".tar"]
    sizes = {name: files[name].stat().st_size for name in missing}
    size = sum(sizes.values())
    with tqdm(total=size, unit="B", unit_scale=True, desc="upload", disable=None if progress else True) as bar:
        for name in [name for name in missing if name not in last] + last:
            storage.put(files[name], storage.join(url, name))
            bar.update(sizes[name])
    _remove_objects(url, there.keys() - files.keys())
    remove_uploaded(folder)  # also by a process that finds the dataset complete
    log.info(f"{url}: {len(files)} files, the manifest last")


def remove_uploaded(folder: Path) -> None:
    """Delete a folder, its manifests first and its account last: what a kill leaves of it is not a complete dataset."""
    with contextlib.suppress(OSError):
        clear(folder)
    shutil.rmtree(folder, ignore_errors=True)

"""Files of minimal pairs, BLiMP's and Zorro's. Without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megabert.common import tables


class Pair(NamedTuple):
    """An acceptable and an unacceptable sentence; `paradigm`: the phenomenon in which they differ, `field`: its group of
    paradigms."""

    good: str
    bad: str
    paradigm: str
    field: str


def read_pairs(source: str | Path, each: int = 0) -> list[Pair]:
    """The pairs of a file, or of all .jsonl and .txt files below a folder; `each` is the largest number of each paradigm.

    .jsonl, BLiMP's format (Warstadt et al. 2020): `sentence_good`, `sentence_bad` and optionally `UID` and `field`, by default
    the file's name. .txt, Zorro's (Huebner et al. 2021): lines in pairs, the wrong sentence first, in a file PARADIGM's name
    FIELD-PARADIGM.txt. Raises ValueError naming file and line.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for ending in READERS for file in path.rglob(f"*{ending}"))
    else:
        files = [path]
    if not files or any(file.suffix not in READERS for file in files):
        raise ValueError(f"{path}: neither a {' or '.join(READERS)} file nor a folder of such files")
    # (field, paradigm) -> pairs by folder: equal names in several folders are several paradigms
    kept: dict[tuple[str, str], dict[Path, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for pair in READERS[file.suffix](file):
            of_folder = kept[pair.field, pair.paradigm][file.parent]
            if not each or len(of_folder) < each:
                of_folder.append(pair)
    pairs = [
        pair if len(folders) == 1 else pair._replace(paradigm=f"{folder.relative_to(path)}/{pair.paradigm}")
        for folders in kept.values()
        for folder, of_folder in folders.items()
        for pair in of_folder
    ]
    if not pairs:
        raise ValueError(f"{path}: has no pair in it")
    return pairs


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    return ((number, line.strip()) for number, line in tables.lines(file) if line.strip())


def _read_jsonl(file: Path) -> Iterator[Pair]:
    for number, line in _lines(file):
        values = tables.parse_json(where := f"{file}, line {number}", line)
        try:
            good, bad = values["sentence_good"], values["sentence_bad"]
            if not isinstance(good, str) or not isinstance(bad, str):
                raise TypeError("they are not text")
            if tables.TWICE in values.values():
                raise TypeError("a field is there twice")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where}: no object with sentence_good and sentence_bad ({error})") from None
        if not (good.strip() and bad.strip()):
            raise ValueError(
                f"{where}: {'sentence_bad' if good.strip() else 'sentence_good'} is empty; remove the pair"
            )
        yield Pair(good, bad, str(values.get("UID", file.stem)), str(values.get("field", file.stem)))


def _read_txt(file: Path) -> Iterator[Pair]:
    lines = [line for _, line in _lines(file)]
    if len(lines) % 2:
        raise ValueError(
            f"{file}: has {len(lines)} lines, which are not pairs; a pair is the wrong sentence, then the right one"
        )
    field = file.stem.rpartition("-")[0] or file.stem
    yield from (Pair(good, bad, file.stem, field) for bad, good in zip(lines[::2], lines[1::2], strict=True))


READERS = {".jsonl": _read_jsonl, ".txt": _read_txt}

"""Submissions: predictions of a benchmark's unlabelled files, named and formed as its site takes them.

GLUE takes one zip of tables `index`, `prediction`, named as in `NAMES`: 0 and 1, the names of the labels for MNLI, QNLI,
RTE and the diagnostic set AX, and 0 to 5 with three decimals for STS-B. SQuAD takes JSON of id and answer.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megabert.common.files import write_whole
from megabert.common.logs import log
from megabert.finetune.datasets import SHOWN

NAMES = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI", "AX")
HEADER = "index\tprediction"
DATE = (1980, 1, 1, 0, 0, 0)  # the same predictions are the same zip
ZIP = "submission.zip"
FILL = "0"  # for a row of QQP that is cut and so has no prediction: most pairs are no duplicates


def indices(name: str, ids: Sequence[str]) -> list[int]:
    """The indices of a test file as numbers. Raises ValueError where one is none, or is missing and its row not merely cut."""
    for identity in ids:
        if not re.fullmatch("[0-9]+", identity):
            raise ValueError(f"{name}: index {identity!r:.40} of its test file is no number, as GLUE's are")
    found = [int(identity) for identity in ids]
    missing = set(range(max(found))) - set(found)
    if missing and name != "QQP":
        raise ValueError(f"{name}: its test file has no index {min(missing)}, and GLUE wants all")
    return found


def glue_table(name: str, predictions: str) -> str:
    """A file of the zip from the predictions of `megabert finetune --predict`, by index. Errors as of `indices`.

    Rows of QQP that are cut, and so have no prediction, get a line too.
    """
    header, *lines = predictions.rstrip("\n").split("\n")
    assert header == HEADER, header
    ids, values = zip(*(line.split("\t") for line in lines), strict=True)
    if name == "STS-B":
        values = tuple(f"{min(max(float(value), 0.0), 5.0):.3f}" for value in values)
    found = dict(zip(indices(name, ids), values, strict=True))
    missing = sorted(set(range(max(found))) - found.keys())
    if missing:
        shown = ", ".join(map(str, missing[:SHOWN])) + ", …" * (len(missing) > SHOWN)
        log.warning(f"{name}: {len(missing):,} test rows are cut and get {FILL!r}: {shown}")
        found |= dict.fromkeys(missing, FILL)
    return "\n".join([HEADER, *(f"{i}\t{found[i]}" for i in sorted(found))]) + "\n"


def write_glue(folder: Path, predictions: Mapping[str, Path]) -> list[str]:
    """`folder`/NAME.tsv for each of the predictions' files, and `ZIP` of all; which of `NAMES` are not there.

    Each file appears whole. Raises ValueError for predictions that no submission can be made of.
    """
    tables = {
        name: glue_table(name, predictions[name].read_text(encoding="utf-8")) for name in NAMES if name in predictions
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in tables.items():
            entry = zipfile.ZipInfo(f"{name}.tsv", DATE)
            entry.external_attr = 0o644 << 16  # what unzip makes its mode of
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED)
    folder.mkdir(exist_ok=True)
    for name, text in tables.items():
        write_whole(folder / f"{name}.tsv", text.encode())
    write_whole(folder / ZIP, buffer.getvalue())
    return [name for name in NAMES if name not in tables]


def write_plain(folder: Path, predictions: Mapping[str, Path]) -> None:
    """The predictions' files as they are."""
    folder.mkdir(exist_ok=True)
    for path in predictions.values():
        for part in (path, path.with_name(f"{path.stem}.no_answer.json")):
            if part.is_file():
                write_whole(folder / part.name, part.read_bytes())

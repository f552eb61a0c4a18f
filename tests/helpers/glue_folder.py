"""A folder of GLUE's nine tasks in the layout of its own download, with a few made-up examples each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.helpers.finetune_problem import sentences

ENTAILMENT = ("entailment", "not_entailment")
MNLI = "index\tpromptID\tpairID\tgenre\ts1_bp\ts2_bp\ts1_p\ts2_p\tsentence1\tsentence2"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
Row = Callable[[int, str, str], str]


def pairs(count: int, seed: int) -> Iterator[tuple[int, str, str]]:
    texts = [" ".join(words) for words in sentences(2 * count, seed)]
    for number in range(count):
        yield number, f"w{number % 40} {texts[2 * number]}", texts[2 * number + 1]


def write(path: Path, header: str, row: Row, count: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*([header] if header else []), *(row(*pair) for pair in pairs(count, seed))]
    path.write_text("\n".join(lines) + "\n")


def of_three(number: int) -> str:
    return ("contradiction", "entailment", "neutral")[number % 3]


def write_folder(folder: Path, train: int = 20, dev: int = 8) -> Path:
    """All nine; labels are those of the row's number. Gives the folder."""
    start = "genre\tfile\t2012\t0\tsource\tsource"
    before = "5\t5e\tfiction\t(\t(\t(\t("
    rows: dict[str, tuple[str, Row]] = {
        "CoLA": ("", lambda n, a, b: f"gj04\t{n % 2}\t\t{a}"),
        "SST-2": ("sentence\tlabel", lambda n, a, b: f"{a} \t{n % 2}"),
        "MRPC": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", lambda n, a, b: f"{n % 2}\t7\t8\t{a}\t{b}"),
        "STS-B": (f"{STSB}\tscore", lambda n, a, b: f"{n}\t{start}\t{a}\t{b}\t{n % 6}.000"),
        "QQP": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", lambda n, a, b: f"{n}\t3\t4\t{a}\t{b}\t{n % 2}"),
        "MNLI": (
            f"{MNLI}\tlabel1\tgold_label",
            lambda n, a, b: f"{n}\t{before}\t{a}\t{b}\t{of_three(n)}\t{of_three(n)}",
        ),
    }
    for name, columns, labels in (
        ("QNLI", "question\tsentence", ENTAILMENT),
        ("RTE", "sentence1\tsentence2", ENTAILMENT),
        ("WNLI", "sentence1\tsentence2", ("0", "1")),
    ):
        rows[name] = f"index\t{columns}\tlabel", lambda n, a, b, of=labels: f"{n}\t{a}\t{b}\t{of[n % 2]}"  # type: ignore[misc]
    for name, row in rows.items():
        write(folder / name / "train.tsv", *row, train, 1)
        for seed, part in enumerate(("_matched", "_mismatched") if name == "MNLI" else ("",)):
            write(folder / name / f"dev{part}.tsv", *row, dev, 10 + seed)
    return folder

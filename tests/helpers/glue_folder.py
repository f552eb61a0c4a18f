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


def write_folder(folder: Path, train: int = 20, dev: int = 8, test: int = 5) -> Path:
    """All nine and the diagnostic set; labels are those of the row's number. Gives the folder."""

    def task(name: str, labelled: tuple[str, Row], unlabelled: tuple[str, Row], dev_row: tuple[str, Row] | None = None) -> None:  # fmt: skip
        parts = ("_matched", "_mismatched") if name == "MNLI" else ("",)
        write(folder / name / "train.tsv", *labelled, train, 1)
        for seed, part in enumerate(parts):
            write(folder / name / f"dev{part}.tsv", *(dev_row or labelled), dev, 10 + seed)
            write(folder / name / f"test{part}.tsv", *unlabelled, test, 20 + seed)

    task("CoLA", ("", lambda n, a, b: f"gj04\t{n % 2}\t\t{a}"), ("index\tsentence", lambda n, a, b: f"{n}\t{a}"))
    task(
        "SST-2", ("sentence\tlabel", lambda n, a, b: f"{a} \t{n % 2}"), ("index\tsentence", lambda n, a, b: f"{n}\t{a}")
    )
    task(
        "MRPC",
        ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", lambda n, a, b: f"{n % 2}\t7\t8\t{a}\t{b}"),
        ("index\t#1 ID\t#2 ID\t#1 String\t#2 String", lambda n, a, b: f"{n}\t7\t8\t{a}\t{b}"),
    )
    start = "genre\tfile\t2012\t0\tsource\tsource"
    task(
        "STS-B",
        (f"{STSB}\tscore", lambda n, a, b: f"{n}\t{start}\t{a}\t{b}\t{n % 6}.000"),
        (STSB, lambda n, a, b: f"{n}\t{start}\t{a}\t{b}"),
    )
    task(
        "QQP",
        ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", lambda n, a, b: f"{n}\t3\t4\t{a}\t{b}\t{n % 2}"),
        ("id\tquestion1\tquestion2", lambda n, a, b: f"{n}\tcut" if n == 2 else f"{n}\t{a}\t{b}"),
    )
    before = "5\t5e\tfiction\t(\t(\t(\t("
    task(
        "MNLI",
        (f"{MNLI}\tlabel1\tgold_label", lambda n, a, b: f"{n}\t{before}\t{a}\t{b}\t{of_three(n)}\t{of_three(n)}"),
        (MNLI, lambda n, a, b: f"{n}\t{before}\t{a}\t{b}"),
        (
            f"{MNLI}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
            lambda n, a, b: f"{n}\t{before}\t{a}\t{b}\tx\tx\tx\tx\tx\t{of_three(n)}",
        ),
    )
    for name, columns, labels in (
        ("QNLI", "question\tsentence", ENTAILMENT),
        ("RTE", "sentence1\tsentence2", ENTAILMENT),
        ("WNLI", "sentence1\tsentence2", ("0", "1")),
    ):
        task(
            name,
            (f"index\t{columns}\tlabel", lambda n, a, b, of=labels: f"{n}\t{a}\t{b}\t{of[n % 2]}"),  # type: ignore[misc]
            (f"index\t{columns}", lambda n, a, b: f"{n}\t{a}\t{b}"),
        )
    write(folder / "diagnostic/diagnostic.tsv", "index\tsentence1\tsentence2", lambda n, a, b: f"{n}\t{a}\t{b}", 6, 30)  # fmt: skip
    return folder

"""Functions of the user's own files as filters: what they return decides, a mistake names function and document."""

import json

import pytest

from data_prep.common.errors import BadInput
from data_prep.filters.functions import FilterFunction

SOURCE = """
def keep(text, metadata):
    number = int(text.split()[1])
    if number % 5 == 0:
        return "a multiple of five"
    return metadata["document"] > 0 and metadata["tokens"] > 3 and metadata["source"].endswith("a.txt")

def plain(text):
    return "ends" in text

def number(text):
    return len(text)
"""
NAMED = {"source": "a.txt", "document": 7, "tokens": 4}


@pytest.fixture
def filters(tmp_path):
    path = tmp_path / "my_filters.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def build(command, tokenizer_file, tmp_path):
    lines = [f"Line {i} is here. It goes its way and ends at number {i * i}." for i in range(200)]
    (tmp_path / "a.txt").write_text("\n".join(lines))

    def run(*extra):
        return command(
            "build", "--input", tmp_path / "a.txt", "--text-documents", "line", "--output", tmp_path / "out", "--seq-len", 32,
            "--held-out", 0, "--tokenizer", tokenizer_file, "--workers", 2, "--quiet", *extra,
        )  # fmt: skip

    return run


def test_a_function_drops_by_its_reasons(build, filters, tmp_path):
    result = build("--filters", "min-words=2", f"{filters}:keep")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["dropped"]["reasons"] == {"keep: a multiple of five": 40}
    digests = json.loads((tmp_path / "out" / "manifest.json").read_text())["options"]["digests"]
    assert list(digests) == [str(filters)] and len(digests[str(filters)]) == 64


def test_a_changed_function_is_not_resumed(build, filters, tmp_path):
    assert build("--filters", f"{filters}:plain").returncode == 0
    filters.write_text(SOURCE.replace('"ends"', '"way"'))
    result = build("--filters", f"{filters}:plain")
    assert (
        result.returncode == 2
        and "digests: " in result.stderr
        and "my filters.py was" in result.stderr.replace("_", " ")
    )
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_exception_names_function_and_document(build, filters, tmp_path):
    lines = (tmp_path / "a.txt").read_text()
    filters.write_text("def keep(text):\n    return 1 / ('number 9.' not in text) > 0")
    result = build("--filters", f"{filters}:keep")
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1
    assert (
        f"--filters {filters}:keep: {tmp_path}/a.txt: document at {lines.index('Line 3 ')}: ZeroDivisionError"
        in result.stderr
    )


def test_mistakes_of_a_function_are_named(filters):
    for name, message in (("gone", "no function of that name"), ("SOURCE", "no function")):
        with pytest.raises(BadInput, match=message):
            FilterFunction(str(filters), name).check()
    with pytest.raises(
        BadInput, match=r"number: a\.txt: document at 7: TypeError: returned 4, must return True, False"
    ):
        FilterFunction(str(filters), "number").objection("text", NAMED)
    assert FilterFunction(str(filters), "plain").objection("it ends", NAMED) == ""
    assert FilterFunction(str(filters), "plain").objection("it goes", NAMED) == "plain"
    with pytest.raises(BadInput, match=r"gone\.py:keep: FileNotFoundError"):
        FilterFunction(str(filters.with_name("gone.py")), "keep").check()


def test_training_shows_functions_what_reading_does(command, filters, tmp_path):
    """No document that is empty, and none that a rule drops."""
    texts = [
        "  ",
        "Short.",
        "A heading",
        *(f"Line {i} is here. It goes its way and ends at number {i * i}." for i in range(200)),
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    filters.write_text("def keep(text):\n    return len(text.split()[4]) > 1")
    result = command(
        "build", "--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--seq-len", 32, "--held-out", 0, "--vocab-size", 60,
        "--workers", 1, "--quiet", "--filters", "min-words=5", f"{filters}:keep",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    reasons = json.loads((tmp_path / "out" / "report.json").read_text())["dropped"]["reasons"]
    assert reasons == {"empty": 1, "min-words": 2}

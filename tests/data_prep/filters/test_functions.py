"""Functions of the user's own files as filters: what they return decides, a mistake names function and document."""

import json
from functools import partial

import pytest

from data_prep.common.errors import BadInput
from data_prep.filters.functions import FilterFunction
from tests.helpers import prep_builds
from tests.helpers.prep_builds import build_here, error_of, report
from tests.helpers.prep_reading import records, write

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


LINES = [f"Line {i} is here. It goes its way and ends at number {i * i}." for i in range(200)]


@pytest.fixture
def filters(tmp_path):
    return write(tmp_path / "my_filters.py", SOURCE)


@pytest.fixture
def build(tokenizer_file, tmp_path):
    options = {"text_documents": "line", "seq_len": 32, "held_out": 0, "tokenizer": tokenizer_file, "workers": 2}
    return partial(prep_builds.build, write(tmp_path / "a.txt", "\n".join(LINES)), tmp_path / "out", **options)


def test_a_function_drops_by_its_reasons(build, filters, tmp_path):
    build(filters=("min-words=2", f"{filters}:keep"))
    assert report(tmp_path / "out")["dropped"]["reasons"] == {"keep: a multiple of five": 40}
    digests = json.loads((tmp_path / "out" / "manifest.json").read_text())["options"]["digests"]
    assert list(digests) == [str(filters)] and len(digests[str(filters)]) == 64


def test_a_changed_function_is_not_resumed(build, filters):
    build(filters=f"{filters}:plain")
    filters.write_text(SOURCE.replace('"ends"', '"way"'))
    error = error_of(build(filters=f"{filters}:plain", code=2))
    assert "digests: " in error and "my filters.py was" in error.replace("_", " ")


def test_an_exception_names_function_and_document(build, filters, tmp_path):
    filters.write_text("def keep(text):\n    return 1 / ('number 9.' not in text) > 0")
    place = "\n".join(LINES).index("Line 3 ")
    error = error_of(build(filters=f"{filters}:keep", code=2))
    assert f"--filters {filters}:keep: {tmp_path}/a.txt: document at {place}: ZeroDivisionError" in error


def test_mistakes_of_a_function_are_named(filters):
    for name, message in (("gone", "no function of that name"), ("SOURCE", "no function")):
        with pytest.raises(BadInput, match=message):
            FilterFunction(str(filters), name).check()
    with pytest.raises(BadInput, match=r"number: a\.txt: document at 7: TypeError: returned 4, must return True"):
        FilterFunction(str(filters), "number").objection("text", NAMED)
    assert FilterFunction(str(filters), "plain").objection("it ends", NAMED) == ""
    assert FilterFunction(str(filters), "plain").objection("it goes", NAMED) == "plain"
    with pytest.raises(BadInput, match=r"gone\.py:keep: FileNotFoundError"):
        FilterFunction(str(filters.with_name("gone.py")), "keep").check()
    exits = write(filters.with_name("exits.py"), "def keep(text):\n    exit(0)\n")
    with pytest.raises(BadInput, match=r"keep: a\.txt: document at 7: SystemExit: 0"):
        FilterFunction(str(exits), "keep").objection("text", NAMED)
    with pytest.raises(BadInput, match=r"exits\.py:gone: SystemExit: no"):
        FilterFunction(str(write(exits, "raise SystemExit('no')")), "gone").check()
    for failure in ("OSError(28, 'No space left on device')", "MemoryError()"):
        fails = write(filters.with_name(f"{failure[:5]}.py"), f"def keep(text):\n    raise {failure}\n")
        with pytest.raises((OSError, MemoryError)):  # no mistake, which would end the build for good
            FilterFunction(str(fails), "keep").objection("text", NAMED)


def test_training_shows_functions_what_reading_does(filters, tmp_path):
    """No document that is empty, and none that a rule drops."""
    path = write(tmp_path / "a.jsonl", records(["  ", "Short.", "A heading", *LINES]))
    filters.write_text("def keep(text):\n    return len(text.split()[4]) > 1")
    options = {"seq_len": 32, "held_out": 0, "vocab_size": 60, "workers": 1}
    facts = build_here(path, tmp_path / "out", filters=("min-words=5", f"{filters}:keep"), **options)
    assert facts["dropped"]["reasons"] == {"empty": 1, "min-words": 2}

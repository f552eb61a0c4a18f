"""Help shows defaults and nothing else; old spellings work, say the new one and are in no help text."""

from __future__ import annotations

import pytest

from megabert.common import arguments, logs
from megabert.common.arguments import Parser, called_as


def parser() -> Parser:
    made = Parser(prog="x", description="First line.\n\n    kept as it is\n")
    add = made.add_argument
    add("--model", old=["--run", "-R"], required=True, metavar="DIR", help="what is read")
    add("--rows", type=int, default=0, help="at most")
    add("--lr", type=float, default=5e-5, help="100% of it")
    add("--seq-len", nargs="+", type=int, default=[128, 512], help="tokens")
    add("--tokenizer", default="", help="a file")
    add("--limit", type=int, help="none")
    add("--labels", nargs="+", default=[], help="in order")
    add("--quiet", action="store_true", help="no bar")
    add("rest", nargs="*", default=["a"], help="more")
    return made


def test_help_shows_each_default_once_and_no_empty_one() -> None:
    shown = " ".join(parser().format_help().split())
    for text in ("at most (default: 0)", "100% of it (default: 5e-05)", "tokens (default: 128 512)"):
        assert text in shown
    assert shown.count("default") == 3
    assert "    kept as it is\n" in parser().format_help()


@pytest.fixture()
def lines(capsys):
    logs.setup()
    return lambda: capsys.readouterr().err


@pytest.mark.parametrize("given", [["--model", "a"], ["--model=a"], ["--mod", "a"]])
def test_the_new_spelling_is_silent(given: list[str], lines) -> None:
    assert parser().parse_args(given).model == "a" and lines() == ""


@pytest.mark.parametrize("given", [["--run", "a"], ["--run=a"], ["b", "--run", "a"]])
@pytest.mark.parametrize("method", ["parse_args", "parse_intermixed_args"])
def test_an_old_spelling_works_and_says_the_new_one_once(given: list[str], method: str, lines) -> None:
    assert getattr(parser(), method)(given).model == "a"
    assert lines() == "warning: --run is now --model; the next release no longer knows --run\n"


def test_after_a_double_dash_words_are_words(lines) -> None:
    args = parser().parse_args(["--model", "a", "--", "--run"])
    assert args.model == "a" and args.rest == ["--run"] and lines() == ""


def test_old_spellings_are_not_shown(capsys) -> None:
    assert "--run" not in parser().format_help() and "-R" not in parser().format_help()
    with pytest.raises(SystemExit) as end:
        parser().parse_args([])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.endswith("error: the following arguments are required: --model\n")


def test_usage_says_how_the_command_was_called(monkeypatch) -> None:
    monkeypatch.setattr(arguments, "_called_as", "")
    assert called_as("megabert.commands.fill") == "python -m megabert fill"
    arguments.call_as("megabert fill")
    assert called_as("megabert.commands.fill") == "megabert fill"

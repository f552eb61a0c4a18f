"""Help shows defaults and nothing else; usage shows how the command was called."""

from __future__ import annotations

import pytest

from megabert.common import arguments
from megabert.common.arguments import Parser, called_as


def test_help_shows_each_default_once() -> None:
    parser = Parser(prog="x", description="First line.\n\n    kept as it is\n")
    add = parser.add_argument
    add("--rows", type=int, default=0, help="at most")
    add("--lr", type=float, default=5e-5, help="100% of it")
    add("--seq-len", nargs="+", type=int, default=[128, 512], help="tokens")
    add("--tokenizer", default="", help="a file")
    add("--limit", type=int, help="none")
    add("--labels", nargs="+", default=[], help="in order")
    add("--quiet", action="store_true", help="no bar")
    add("rest", nargs="*", default=["a"], help="more")
    shown = " ".join(parser.format_help().split())
    for text in ("at most (default: 0)", "100% of it (default: 5e-05)", "tokens (default: 128 512)"):
        assert text in shown
    assert shown.count("default") == 3
    assert "    kept as it is\n" in parser.format_help()


def test_usage_shows_how_the_command_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_called_as", "")
    assert called_as("megabert.commands.fill") == "python -m megabert.commands.fill"
    arguments.call_as("megabert fill")
    assert called_as("megabert.commands.fill") == "megabert fill"

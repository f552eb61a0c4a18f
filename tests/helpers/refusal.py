"""A mistake that a command answers with one line."""

from collections.abc import Callable

import pytest


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and not captured.out, captured
    return captured.err


def refusal(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *words: object) -> str:
    """What `main` answers to `words`."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    return one_line(capsys)

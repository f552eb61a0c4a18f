"""Command lines: help that shows every default, and the name a command was called by."""

from __future__ import annotations

import argparse
from typing import Any

_called_as = ""


def call_as(name: str) -> None:
    """Usage lines of this process show `name`, e.g. "megabert train"."""
    global _called_as
    _called_as = name


def called_as(module: str) -> str:
    """How this process was called; `python -m module` where no name was set."""
    return _called_as or f"python -m {module}"


class Help(argparse.RawDescriptionHelpFormatter):
    """The description as it is written, and after each option its default where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default in (None, "", argparse.SUPPRESS) or isinstance(default, bool):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{text} (default: {shown})".replace("%", "%%") if shown else text


class Parser(argparse.ArgumentParser):
    """An argument parser with `Help`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Help} | options)

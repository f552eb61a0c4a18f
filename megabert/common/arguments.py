"""Command lines: help that shows every default, old spellings of options, the name a command was called by."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megabert.common.logs import log

_called_as = ""


def call_as(name: str) -> None:
    """Usage lines of this process say `name`, e.g. "megabert train"."""
    global _called_as
    _called_as = name


def called_as(module: str) -> str:
    """How this process was called; `python -m module` where nobody said."""
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
    """An argument parser whose options may have old spellings, which are accepted with a line that says the new one."""

    def __init__(self, **options: Any) -> None:
        self._renamed: dict[str, str] = {}
        super().__init__(**{"formatter_class": Help} | options)

    def add_argument(self, *names: str, old: Sequence[str] = (), **options: Any) -> argparse.Action:
        """As argparse's; `old` spellings of the option are in no help text."""
        action = super().add_argument(*names, *old, **options)
        if old:
            action.option_strings = list(names)
            self._renamed |= dict.fromkeys(old, names[0])
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else list(args)
        for word in args[: args.index("--")] if "--" in args else args:
            name = word.partition("=")[0]
            if name in self._renamed:
                log.warning(f"{name} is now {self._renamed[name]}; the next release no longer knows {name}")
        return super().parse_known_args(args, namespace)

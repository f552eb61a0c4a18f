"""Filters by functions in the user's Python files.

The arguments of a function are the cleaned text of a document, with a blank line between paragraphs, and optionally a dict of
"source" (the file), "document" (its byte offset or row there) and "tokens". True keeps the document; False drops it, and so does a
string, under which it is counted. The function is identified by the file's digest, without imported files.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from data_prep.common.errors import BadInput

SPELLED = re.compile(r"(.+\.py):(\w+)")


@dataclass(frozen=True)
class FilterFunction:
    """Function `name` of the Python file `path`."""

    path: str
    name: str

    @staticmethod
    def is_meant(item: str) -> bool:
        """Whether an item of --filters names a function, not a rule."""
        return bool(SPELLED.fullmatch(item))

    @staticmethod
    def parse(item: str) -> FilterFunction:
        match = SPELLED.fullmatch(item)
        assert match
        return FilterFunction(*match.groups())

    def check(self) -> None:
        """Raises BadInput if the file can't be imported or has no such function."""
        _load(self)

    def objection(self, text: str, metadata: Mapping[str, Any]) -> str:
        """Why a document is dropped; "" if it is kept. Raises BadInput naming function and document for an exception in it."""
        try:
            verdict = _load(self)(text, dict(metadata))
            if not isinstance(verdict, bool | str):
                raise TypeError(f"returned {verdict!r:.40}, must return True, False or a reason")
        except Exception as error:
            where = f"{metadata['source']}: document at {metadata['document']}"
            raise BadInput(f"--filters {self.path}:{self.name}: {where}: {_one_line(error)}") from error
        if isinstance(verdict, str):
            return f"{self.name}: {verdict}"
        return "" if verdict else self.name


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@lru_cache(maxsize=16)
def _load(function: FilterFunction) -> Callable[[str, dict[str, Any]], Any]:
    """The function, wrapped to have two arguments."""
    named = f"--filters {function.path}:{function.name}"
    spec = importlib.util.spec_from_file_location("data_prep_filter", function.path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{named}: {_one_line(error)}") from error
    call = getattr(module, function.name, None)
    if not callable(call):
        raise BadInput(f"{named}: the file has no function of that name")
    try:
        inspect.signature(call).bind("", {})
    except TypeError:
        return lambda text, metadata: call(text)
    return call

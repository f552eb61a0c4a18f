"""Filters by functions in the user's Python files.

The arguments of a function are the cleaned text of a document, with a blank line between paragraphs, and optionally a dict of
"source" (the file), "document" (its byte offset or row there) and "tokens". True keeps the document; False drops it, and so does a
string, under which it is counted. The function is identified by the file's digest, without imported files.
"""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from data_prep.common.errors import BadInput, refuse_failure

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
        return FilterFunction(*item.rsplit(":", 1))

    def check(self) -> None:
        """Raises BadInput if the file can't be imported or has no such function."""
        _load(self)

    def objection(self, text: str, metadata: Mapping[str, Any]) -> str:
        """Why a document is dropped; "" if it is kept. Raises BadInput naming function and document for an exception in it, but not for
        a lack of memory or a disk that fails, after which the same command resumes."""
        try:
            verdict = _load(self)(text, dict(metadata))
            if not isinstance(verdict, bool | str):
                raise TypeError(f"returned {verdict!r:.40}, must return True, False or a reason")
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            refuse_failure(error, self.path)
            raise self._mistake(error, f"{metadata['source']}: document at {metadata['document']}: ") from error
        if isinstance(verdict, str):
            return f"{self.name}: {verdict}"
        return "" if verdict else self.name

    def _mistake(self, error: BaseException, where: str = "") -> BadInput:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return BadInput(f"--filters {self.path}:{self.name}: {where}{line}")


@lru_cache(maxsize=16)
def _load(function: FilterFunction) -> Callable[[str, dict[str, Any]], Any]:
    """The function, wrapped to have two arguments."""
    try:
        call = runpy.run_path(function.path).get(function.name)
    except (Exception, SystemExit) as error:
        raise function._mistake(error) from error
    if not callable(call):
        raise BadInput(f"--filters {function.path}:{function.name}: the file has no function of that name")
    try:
        inspect.signature(call).bind("", {})
    except TypeError:
        return lambda text, metadata: call(text)
    return call


def forget() -> None:
    """Load files again, which may have changed since an earlier build of this process."""
    _load.cache_clear()

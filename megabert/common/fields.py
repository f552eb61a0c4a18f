"""Text fields of records: one by name, one inside others (`article.body`), several joined (`title+abstract`).

A name that a record or table has literally comes first, whatever signs are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# between joined fields: each is a paragraph
JOINT = "\n\n"


def names(spec: str, has: Any) -> list[str]:
    """The fields that `spec` joins, in order; `has` contains the existing names."""
    return [spec] if spec in has or "+" not in spec else spec.split("+")


def path(name: str, has: Any) -> list[str]:
    """Names from the outermost record to the field."""
    return [name] if name in has else name.split(".")


def find(record: dict[str, Any], name: str) -> Any:
    """The value of a field of a record. Raises KeyError where it has none."""
    value: Any = record
    for part in path(name, record):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise KeyError(part)
        value = value[part]
    return value


def join(texts: Sequence[str | None]) -> str | None:
    """Joined texts of the fields of one record; None where all are None."""
    present = [text for text in texts if text is not None]
    return JOINT.join(present) if present else None


def joined(values: Sequence[Any]) -> Any:
    """The value of one field; of several their joined texts, None where all are None. Raises ValueError for several fields
    that are not all texts."""
    if len(values) == 1:
        return values[0]
    if not all(value is None or isinstance(value, str) for value in values):
        raise ValueError("joins columns that are no texts")
    return join(values)

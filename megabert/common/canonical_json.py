"""Canonical JSON and its SHA-256 seal: one text for one value, and a field that no change of another goes unseen by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, an item a line, a line end."""
    return (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()


def compact(value: Any) -> bytes:
    """The one JSON text of `value` without blanks: what a dataset's fingerprint is of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest(tree: Mapping[str, Any], field: str, text: Any = canonical) -> str:
    """SHA-256 in hex of all fields of `tree` but `field`, which holds it, written as `text` writes them."""
    return hashlib.sha256(text({name: value for name, value in tree.items() if name != field})).hexdigest()


def sealed(tree: Mapping[str, Any], field: str, text: Any = canonical) -> bytes:
    """The canonical text of `tree` with its digest in `field`."""
    return canonical(dict(tree) | {field: digest(tree, field, text)})

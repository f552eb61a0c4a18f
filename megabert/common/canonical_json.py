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
    rest = {name: value for name, value in tree.items() if name != field}
    if text is not canonical or not rest:
        return canonical(rest | {field: digest(rest, field, text)})
    body = canonical(rest)  # a large one is put into words once: the digest becomes a line of it
    line = f'\n {json.dumps(field)}: "{hashlib.sha256(body).hexdigest()}"'.encode()
    later = [name for name in rest if name > field]
    if not later:
        return body[: -len("\n}\n")] + b"," + line + b"\n}\n"
    place = body.index(f"\n {json.dumps(min(later))}: ".encode())
    return body[:place] + line + b"," + body[place:]

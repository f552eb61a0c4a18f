"""What BERT's tokenizer does to text before it looks for pieces, and the file that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CONFIG = "tokenizer_config.json"  # beside a vocab.txt
NOTHING_SAID: Mapping[str, bool | None] = {}
FIELDS = {
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "ideographs": "tokenize_chinese_chars",
}


@dataclass(frozen=True)
class Casing:
    """What BERT's tokenizer does to text: lower-cases it, drops accents (all of Unicode's non-spacing marks, of any script),
    puts space around ideographs."""

    lowercase: bool
    strip_accents: bool
    ideographs: bool = True


def read_casing(path: Path) -> dict[str, bool | None]:
    """What Hugging Face's tokenizer_config.json says of the fields of `Casing`; None where it says nothing."""
    try:
        found = json.loads(path.read_bytes())
        said = {name: found.get(field) for name, field in FIELDS.items()}
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path}: is no JSON object; remove it or save the tokenizer anew") from None
    for name, value in said.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{path}: {FIELDS[name]} is {value!r:.40}, must be true or false")
    return said

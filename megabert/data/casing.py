"""What BERT's tokenizer does to text before it looks for pieces, and the file that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "tokenizer_config.json"  # beside a vocab.txt
NOTHING_SAID: Mapping[str, bool | None] = {}
FIELDS = {"lowercase": "do_lower_case", "strip_accents": "strip_accents", "ideographs": "tokenize_chinese_chars"}
CLASSES = (  # of Hugging Face, whose text is cut as `BertTokenizer` cuts it; with or without "Fast" behind the name
    *("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "PreTrainedTokenizer", "TokenizersBackend"),
)
CUT_BY = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}  # the only ways that are known


@dataclass(frozen=True)
class Casing:
    """What BERT's tokenizer does to text: lower-cases it, drops accents (all of Unicode's non-spacing marks, of any script),
    puts space around ideographs."""

    lowercase: bool
    strip_accents: bool
    ideographs: bool = True


def read_casing(path: Path) -> dict[str, bool | None]:
    """What Hugging Face's tokenizer_config.json says of the fields of `Casing`; None where it says nothing.

    Raises ValueError for a file that is damaged, or of a tokenizer that cuts text otherwise than BERT's.
    """
    try:
        found = json.loads(path.read_bytes())
        said = {name: found.get(field) for name, field in FIELDS.items()}
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path}: is no JSON object; remove it or save the tokenizer anew") from None
    refuse_other(found, path)
    for name, value in said.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{path}: {FIELDS[name]} is {value!r:.40}, must be true or false")
    return said


def refuse_other(tree: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError naming the field of Hugging Face's file `path` by which text is cut otherwise than by BERT's tokenizer."""
    name = tree.get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in CLASSES:
        raise ValueError(
            f"{path}: tokenizer_class is {name!r:.60}, whose words are not those of BERT's tokenizer; "
            "take a model that has that one"
        )
    for field, want in CUT_BY.items():
        if (found := tree.get(field)) not in (None, want):
            raise ValueError(f"{path}: {field} is {found!r:.60}, only {want!r} can be taken")

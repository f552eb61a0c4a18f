"""Tokenizers of every kind, and transformers' own of the files that we export of them."""

import json
from pathlib import Path
from typing import Any

import transformers

from megabert.data.tokenizer import Tokenizer
from megabert.hf import tokenizer_folder
from tests.helpers import fast_tokenizers, runs

FAST = tuple(f"json-{kind}" for kind in fast_tokenizers.KINDS)


def make(folder: Path, kind: str) -> Tokenizer:
    """Of one of `runs.KINDS` or of FAST."""
    if kind in runs.KINDS:
        return runs.tokenizer(folder, kind)
    folder.mkdir(parents=True, exist_ok=True)
    return Tokenizer.load(fast_tokenizers.write(folder / "tokenizer.json", kind.removeprefix("json-")))


def peer(tokenizer: Tokenizer, folder: Path, length: int = 512) -> Any:
    """What transformers reads from the exported files, beside a config.json of a BERT."""
    folder.mkdir(exist_ok=True)
    for name, data in tokenizer_folder.files(tokenizer, length).items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return transformers.AutoTokenizer.from_pretrained(folder)

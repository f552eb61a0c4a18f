"""Trained models: read from runs and Hugging Face folders, written as Hugging Face folders with a model card."""

import importlib
from typing import TYPE_CHECKING, Any

from megabert.hf.hub import is_model_folder, model_folder

if TYPE_CHECKING:
    from megabert.hf.read import TOKENIZER_FILES, Pretrained, fingerprint, load, write_run

READ = ("TOKENIZER_FILES", "Pretrained", "fingerprint", "load", "write_run")


def __getattr__(name: str) -> Any:
    """The names of `read`, imported on first use, since torch is slow to import."""
    if name in READ:
        return getattr(importlib.import_module("megabert.hf.read"), name)
    raise AttributeError(f"module 'megabert.hf' has no attribute {name!r}")

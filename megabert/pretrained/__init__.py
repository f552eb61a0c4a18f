"""Trained models, read from runs and from Hugging Face folders, and written as them."""

from megabert.pretrained.loading import TOKENIZER_FILES, Pretrained, fingerprint, load, manifest_of

__all__ = ["TOKENIZER_FILES", "Pretrained", "fingerprint", "load", "manifest_of"]

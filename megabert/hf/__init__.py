"""Trained models: read from runs and Hugging Face folders, written as Hugging Face folders with a model card."""

from megabert.hf.read import TOKENIZER_FILES, Pretrained, fingerprint, load

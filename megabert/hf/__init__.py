"""Trained models: read from runs and Hugging Face folders, written as Hugging Face folders with a model card."""

from megabert.common.hub import is_model_folder, model_folder
from megabert.hf.read import TOKENIZER_FILES, Pretrained, fingerprint, load, write_run

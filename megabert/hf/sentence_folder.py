"""Files that make a Hugging Face folder one of sentence-transformers: how its tokens become a text's vector.

    modules.json                         encoder -> 1_Pooling -> 2_Normalize
    sentence_bert_config.json            tokens of a text at most
    config_sentence_transformers.json    vectors are compared by their cosine

`SentenceTransformer(folder)` and the embedding servers read such folders. Nothing in it is code.
"""

from __future__ import annotations

from typing import Any

from megabert import __version__
from megabert.config import Config
from megabert.hf.tokenizer_folder import as_json

MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
# in the spelling that every reader knows
FLAGS = ("pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken", "pooling_mode_max_tokens")


def files(config: Config, pool: str) -> dict[str, bytes]:
    """The files by name, for a folder with the model of `config`. `pool`: "mean" over all tokens, or "cls", the first one (of a
    causal model the last one)."""
    model = config.model
    limit: dict[str, Any] = {"max_seq_length": model.max_positions, "do_lower_case": False}
    if not model.nsp and not model.modern:
        # the class would add an untrained pooler
        limit["model_args"] = {"add_pooling_layer": False}
    pooled = "mean_tokens" if pool == "mean" else "lasttoken" if config.data.masking.causal else "cls_token"
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(MODULES.items())
    ]
    flags = {flag: flag == f"pooling_mode_{pooled}" for flag in FLAGS}
    trees: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": limit,
        "1_Pooling/config.json": {"word_embedding_dimension": model.hidden} | flags,
        "config_sentence_transformers.json": {
            "__version__": {"megabert": __version__},
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    return {name: as_json(tree) for name, tree in trees.items()}

"""Sentence-transformers folders: beside a Hugging Face model's files those that say how its tokens become a text's vector.

    modules.json                                       encoder -> 1_Pooling -> 2_Normalize
    sentence_bert_config.json                          tokens of a text at most
    config_sentence_transformers.json                  vectors are compared by their cosine

`SentenceTransformer(folder)` and the embedding servers that read such folders give the vectors of `Pooling`; so does
`megabert features --pool sentence`. Nothing in it is code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabert import __version__
from megabert.config import Config
from megabert.hf import mapping
from megabert.hf.read import CONFIG, read_json
from megabert.hf.tokenizer_files import as_json

MODULES = "modules.json"
LIMIT, TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"
POOLING = "1_Pooling/config.json"
KINDS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
# flags of a pooling's config, in the spelling that every reader knows
FLAGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
}


@dataclass(frozen=True)
class Pooling:
    """How a text's vector comes from its tokens': `pool` is "mean" over all of them, or "cls": the first one, of a causal
    model the last one. `max_length`: tokens of a text, more are cut."""

    pool: str
    max_length: int
    normalise: bool = True


def is_sentence_folder(folder: str | Path) -> bool:
    """Whether the folder has a pooling."""
    return (Path(folder) / MODULES).is_file()


def read(folder: str | Path) -> Pooling:
    """How a sentence-transformers folder makes a text's vector. Raises ValueError naming what ours cannot do."""
    folder = Path(folder)
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in json.loads((folder / MODULES).read_text())]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{folder / MODULES}: must hold a list of modules") from None
    if kinds not in (list(KINDS)[:2], list(KINDS)):
        raise ValueError(f"{folder / MODULES}: {', '.join(kinds)}; only {', '.join(KINDS)} can be read")
    tree, config = read_json(folder / POOLING), read_json(folder / CONFIG)
    names = {flag: name for name, flag in FLAGS.items()}
    modes = [names.get(key, key) for key, on in tree.items() if key.startswith("pooling_mode_") and on is True]
    if "pooling_mode" in tree:
        # in folders of the library's later releases
        modes = [str(tree["pooling_mode"])]
    token = "lasttoken" if mapping.is_causal(config, str(folder / CONFIG)) else "cls"
    pool = {"mean": "mean", token: "cls"}.get(",".join(modes))
    if pool is None:
        raise ValueError(
            f"{folder / POOLING}: pools by {', '.join(modes) or 'nothing'}; only mean and {token} can be read"
        )
    most = config.get("max_position_embeddings")
    length: Any = None
    for name, field in ((LIMIT, "max_seq_length"), (TOKENIZER, "model_max_length")):
        if length is None and (folder / name).is_file():
            length = read_json(folder / name).get(field)
    length = most if length is None else length
    if isinstance(length, bool) or not isinstance(length, int) or not isinstance(most, int):
        raise ValueError(f"{folder / LIMIT}: max_seq_length must be a number, is {length!r:.40}")
    # a tokenizer may have an infinite limit
    return Pooling(pool, min(length, most), "Normalize" in kinds)


def files(pooling: Pooling, config: Config) -> dict[str, bytes]:
    """The files by name, for a folder that has the model of `config` as transformers reads it."""
    model = config.model
    limit: dict[str, Any] = {"max_seq_length": pooling.max_length, "do_lower_case": False}
    if not model.nsp and not model.modern:
        # no pooler to leave out
        limit["model_args"] = {"add_pooling_layer": False}
    token = "lasttoken" if config.data.masking.causal and pooling.pool == "cls" else pooling.pool
    modes = {flag: name == token for name, flag in FLAGS.items()}
    kinds = list(KINDS)[: 3 if pooling.normalise else 2]
    modules = [
        {"idx": i, "name": str(i), "path": KINDS[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    trees: dict[str, Any] = {
        MODULES: modules,
        LIMIT: limit,
        POOLING: {"word_embedding_dimension": model.hidden} | modes,
        "config_sentence_transformers.json": {
            "__version__": {"megabert": __version__},
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    return {name: as_json(tree) for name, tree in trees.items()}

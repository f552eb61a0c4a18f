"""Reader and writer of sentence-transformers folders: a Hugging Face encoder, how its tokens are pooled, and a card.

    config.json, model.safetensors, tokenizer files   as transformers reads them: `AutoModel` gives the encoder
    modules.json                                       encoder -> 1_Pooling -> 2_Normalize
    sentence_bert_config.json                          tokens of a text at most
    config_sentence_transformers.json                  vectors are compared by their cosine

`SentenceTransformer(folder)` and the embedding servers that read such folders give the vectors of `Pooling`; so does
`megabert features --pool sentence`. Nothing in it is code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from megabert import __version__
from megabert.common.files import appearing
from megabert.hf import mapping, tokenizer_files
from megabert.hf.read import CONFIG, WEIGHTS, Pretrained, read_json

MODULES = "modules.json"
LIMIT = "sentence_bert_config.json"
TOKENIZER = "tokenizer_config.json"
POOLING = "1_Pooling/config.json"
NORMALIZE = "2_Normalize"
PACKAGE = "sentence_transformers.models"
# flags of a pooling's config that ours can be, in the spelling that every reader knows
NAMES = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
}
# spellings of the newer field `pooling_mode`
NEWER = {"lasttoken": "last"}


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
    text = (folder / MODULES).read_text()
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in _list(folder / MODULES, text)]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ValueError(f"{folder / MODULES}: {', '.join(kinds)}; only Transformer, Pooling and Normalize can be read")
    tree = read_json(folder / POOLING)
    modes = [name for name, flag in NAMES.items() if tree.get(flag)]
    others = [key for key, on in tree.items() if key.startswith("pooling_mode_") and on is True]
    if "pooling_mode" in tree:
        modes = others = [NEWER.get(tree["pooling_mode"], str(tree["pooling_mode"]))]
    causal = mapping.is_causal(read_json(folder / CONFIG), str(folder / CONFIG))
    pool = {"mean": "mean", "cls": "" if causal else "cls", "last": "cls" if causal else ""}.get(
        modes[0] if modes and len(others) == 1 else "", ""
    )
    if not pool:
        raise ValueError(f"{folder / POOLING}: pools by {', '.join(others) or 'nothing'}; mean and cls can be read")
    most = read_json(folder / CONFIG).get("max_position_embeddings")
    for name, field in (
        (LIMIT, "max_seq_length"),
        (TOKENIZER, "model_max_length"),
        (CONFIG, "max_position_embeddings"),
    ):
        length = read_json(folder / name).get(field) if (folder / name).is_file() else None
        if length is not None:
            break
    if isinstance(length, bool) or not isinstance(length, int) or not isinstance(most, int):
        raise ValueError(f"{folder / name}: {field} must be a number, is {length!r:.40}")
    # a tokenizer may have an infinite limit
    length = min(length, most)
    return Pooling(pool, length, len(kinds) == 3)


def write(
    folder: str | Path,
    start: Pretrained,
    encoder: Mapping[str, Tensor],
    pooling: Pooling,
    card: str,
    overwrite: bool = True,
) -> None:
    """Write the folder, with `overwrite` in place of one that an earlier call wrote there.

    `encoder`: fp32 weights by our names; pre-training heads are not in it, and the pooler stays `start`'s, whose
    config and tokenizer the folder has too.
    """
    model, causal = start.config.model, start.config.data.masking.causal
    tree = mapping.to_huggingface_config(model, causal)
    tree["architectures"] = [f"{mapping.class_of(model)}Model"]
    named = mapping.to_huggingface(start.weights | dict(encoder), model)
    prefix = mapping.prefix_of(model)
    weights = {name.removeprefix(prefix): w for name, w in named.items() if name.startswith(prefix)}
    limit: dict[str, Any] = {"max_seq_length": pooling.max_length, "do_lower_case": False}
    if not model.nsp and not model.modern:  # whose class has no pooler to leave out
        limit["model_args"] = {"add_pooling_layer": False}
    flag = NAMES["last" if causal and pooling.pool == "cls" else pooling.pool]
    kinds = ("Transformer", "Pooling", "Normalize")[: 3 if pooling.normalise else 2]
    paths = ("", POOLING.partition("/")[0], NORMALIZE)
    files = {
        CONFIG: tree,
        LIMIT: limit,
        POOLING: {"word_embedding_dimension": model.hidden} | {name: name == flag for name in NAMES.values()},
        MODULES: [
            {"idx": i, "name": str(i), "path": path, "type": f"{PACKAGE}.{kind}"}
            for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
        ],
        "config_sentence_transformers.json": {
            "__version__": {"megabert": __version__},
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    with appearing(folder, MODULES, overwrite) as new:
        for path in paths[1 : len(kinds)]:
            (new / path).mkdir()
        for name, data in tokenizer_files.files(start.tokenizer, pooling.max_length, not model.modern).items():
            (new / name).write_bytes(data)
        for name, value in files.items():
            (new / name).write_bytes(tokenizer_files.as_json(value))
        (new / "README.md").write_text(card)
        save_file({k: w.contiguous() for k, w in weights.items()}, new / WEIGHTS[0], {"format": "pt"})
        (new / WEIGHTS[0]).chmod(0o644)  # the library makes it readable by its owner alone


def _list(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        modules = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error!s:.100})") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{path}: must hold a list of modules")
    return modules

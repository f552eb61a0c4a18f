"""A tokenizer's files in a Hugging Face folder."""

from __future__ import annotations

import json
from typing import Any

from megabert.data.tokenizer import TRAINED_FIELDS, Tokenizer, WordPiece
from megabert.hf import tokenizer_export


def files(tokenizer: Tokenizer, max_length: int, segments: bool = True, separators: int = 1) -> dict[str, bytes]:
    """Every file of the tokenizer in a Hugging Face folder, by name; the original is among them.

    `max_length` is the model's number of positions, `segments` whether it uses segment ids, `separators` as of
    `tokenizer_export.build`. Raises as `tokenizer_export.build` does.
    """
    original, special = tokenizer.data, tokenizer.special_ids
    names = {
        f"{role}_token": tokenizer.tokens[i] for role, i in special.items() if role == "pad" or i != special["pad"]
    }
    config: dict[str, Any] = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(tokenizer, WordPiece):
        original = original.replace(b"\r\n", b"\n")  # transformers would take the \r for part of a token
        casing = tokenizer.casing
        strip = None if casing.strip_accents == casing.lowercase else casing.strip_accents
        config |= {
            "do_lower_case": casing.lowercase, "strip_accents": strip, "tokenize_chinese_chars": casing.ideographs,
        }  # fmt: skip
        config |= {field: value for name, field in TRAINED_FIELDS.items() if (value := getattr(casing, name))}
    tokens: dict[str, Any] = dict(names)
    if not tokenizer.continuation:
        flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
        tokens["mask_token"] = {"content": names["mask_token"]} | flags
        config["mask_token"] = tokens["mask_token"] | {"__type": "AddedToken", "special": True}
    return {
        tokenizer.file_name: original,
        "tokenizer.json": (tokenizer_export.build(tokenizer, separators).to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": as_json(config),
        "special_tokens_map.json": as_json(tokens),
    }


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()

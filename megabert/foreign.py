"""A folder that others made is read as data: no code of it is ever run, and what is not understood is refused by name."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megabert.tokenizer import CONTINUATION, MAX_WORD, Tokenizer

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
LARGEST_JSON = 256 << 20  # bytes
RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # in the first releases


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file when it is none."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError("is too large")
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: not found") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error!s:.100})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold one JSON object")
    return found


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The weights file of a folder and its tensors, fp32, under Hugging Face's present names.

    Raises ValueError for a folder without weights, a damaged file, a pickle with anything but tensors in it (which is
    not run), and a tensor that is no floating-point one.
    """
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        shards = [name for name in WEIGHTS if (folder / f"{name}.index.json").is_file()]
        if shards:
            raise ValueError(f"{folder}: its weights are in several files; save them as one {WEIGHTS[0]}")
        raise ValueError(f"{folder}: holds no {' and no '.join(WEIGHTS)}, so no weights")
    try:
        if path.suffix == ".bin":
            with warnings.catch_warnings(
                action="ignore"
            ):  # about the pickle's age; an error says what counts
                found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            found = load_file(path)
    except pickle.UnpicklingError as error:
        reason = next(
            (line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), ""
        )
        raise ValueError(
            f"{path}: holds more than tensors, and a pickle can hold code: nothing of it was run ({reason.strip():.120})"
        ) from None
    except (
        SafetensorError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path}: cannot be read as weights ({first:.120})") from None
    if not isinstance(found, dict) or not all(isinstance(k, str) for k in found):
        raise ValueError(f"{path}: holds no tensors by name")
    tensors = {}
    for name, tensor in found.items():
        if name.endswith(("position_ids", "token_type_ids")):
            continue  # buffers that count up, saved by old versions
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise ValueError(f"{path}: {name} is no floating-point tensor; save the model unquantised")
        tensors[present_name(name)] = tensor.float()
    return path, tensors


def present_name(name: str) -> str:
    """A tensor's name as today's (Megatron)BertForPreTraining has it."""
    for old, new in RENAMED.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return f"bert.{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


def tokenizer_bytes(folder: Path) -> tuple[str, bytes]:
    """The folder's tokenizer as a file of ours: its name (tokenizer.model or vocab.txt) and content.

    A WordPiece tokenizer.json becomes its vocab.txt. Raises ValueError when there is none or it cannot be expressed.
    """
    for name in TOKENIZERS:
        if (folder / name).is_file():
            return "vocab.txt" if name == "vocab.txt" else "tokenizer.model", (folder / name).read_bytes()
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: holds no tokenizer (vocab.txt, tokenizer.model); name one with --tokenizer"
        )
    model = read_json(path).get("model")
    model = model if isinstance(model, dict) else {}
    settings = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": CONTINUATION}
    for field, want in (settings | {"max_input_chars_per_word": MAX_WORD}).items():
        if (found := model.get(field)) != want:
            raise ValueError(
                f"{path}: model.{field} is {found!r:.40}, only {want!r} can be taken; name the tokenizer's own "
                "file with --tokenizer"
            )
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or sorted(vocabulary.values(), key=repr) != sorted(
        range(len(vocabulary)), key=repr
    ):
        raise ValueError(f"{path}: model.vocab does not number its pieces 0, 1, 2, …")
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    if any("\n" in piece for piece in pieces):
        raise ValueError(
            f"{path}: model.vocab has a piece with a line end in it, which a vocab.txt cannot hold"
        )
    return "vocab.txt", "".join(f"{piece}\n" for piece in pieces).encode()


def case_warning(folder: Path, tokenizer: Tokenizer) -> str:
    """What to tell the user where the folder's tokenizer treats case otherwise than ours over the same pieces; or ""."""
    lowercase = None
    if (folder / "tokenizer_config.json").is_file():
        lowercase = read_json(folder / "tokenizer_config.json").get("do_lower_case")
    if lowercase is None and (folder / "tokenizer.json").is_file():
        normalizer = read_json(folder / "tokenizer.json").get("normalizer")
        lowercase = normalizer.get("lowercase") if isinstance(normalizer, dict) else None
    cased = getattr(tokenizer, "cased", None)
    if cased is None or not isinstance(lowercase, bool) or lowercase is not cased:
        return ""
    theirs, ours = ("lower-cases", "does not") if lowercase else ("does not lower-case", "does")
    return (
        f"its tokenizer {theirs} text, ours over the same pieces {ours}: the model sees other ids than before"
    )

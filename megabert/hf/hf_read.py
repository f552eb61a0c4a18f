"""Reader of Hugging Face folders: as data, no code of theirs is ever run, and what is not understood is refused by name."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from megabert.config import Config, DataConfig, MaskingConfig, ModelConfig
from megabert.data.tokenizer import CONTINUATION, MAX_WORD, Tokenizer, refuse_other_tokenizer
from megabert.hf import extend, hf_modern, hf_names
from megabert.model import outline

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
LARGEST_JSON = 256 << 20  # bytes
ENCODER = ("embeddings.", "encoder.", "pooler.", "layers.", "final_norm.")  # names in a class without heads
MLM_HEAD, POOLER, NSP_HEAD = "masked-LM head", "pooler", "next-sentence head"
HEADS = {  # and what the names of their tensors begin with
    MLM_HEAD: ("cls.predictions.", "head.", "decoder."),
    POOLER: ("bert.pooler.",),
    NSP_HEAD: ("cls.seq_relationship.",),
}
PARTS = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer"}  # of a WordPiece tokenizer.json
DECODER = "cls.predictions.decoder."
RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # in the first releases


@dataclass(frozen=True)
class Foreign:
    """`weights` are fp32 under our names; `initialised`: heads that the folder did not have; `ignored`: its tensors that
    ours has no place for."""

    folder: Path
    config: Config
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    initialised: tuple[str, ...]
    ignored: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        """What a checkpoint of step 0 holds besides the weights, but for the step."""
        return {
            "config": self.config.model_dump(),
            "config_sha256": self.config.digest(),
            "dataset": f"none, converted from {self.folder.resolve().name}: begin a new run with init_from",
            "tokenizer": self.tokenizer.sha256,
            "seconds": 0.0,
        }


def read(folder: Path, tokenizer: str | Path = "", nsp: bool = True, words: Sequence[str] = ()) -> Foreign:
    """The model and tokenizer of a Hugging Face BERT folder; the tokenizer may be the file `tokenizer`.

    Heads that are missing are initialised as in a new model; with `nsp` false, and in a decoder, pooler and next-sentence
    head are left out. Each of `words` becomes a piece (`extend`). Raises ValueError naming what cannot be converted; nothing of the folder is run.
    """
    config_file = folder / CONFIG
    tree = read_json(config_file)
    model = hf_names.from_huggingface_config(tree, str(config_file))
    causal = hf_names.is_causal(tree, str(config_file))
    model = model.model_copy(update={"nsp": nsp and not causal and not model.modern})
    file, tensors = read_weights(folder, model)
    weights, initialised, ignored = complete(tensors, model, str(file))
    found = Tokenizer.load(tokenizer) if tokenizer else read_tokenizer(folder)
    if found.kind == "wordpiece" and not tokenizer:
        refuse_other_tokenizer(tree, config_file)
    if doubt := found.doubt():
        raise ValueError(f'{doubt}; put {{"do_lower_case": false}} (or true, and "strip_accents") into one there')
    if found.vocab_size != model.vocab_size:
        raise ValueError(
            f"{found.path}: {found.vocab_size} pieces, but {config_file} says vocab_size={model.vocab_size}"
        )
    if words:
        found, parts = extend.extended(found, words)
        weights = extend.rows_of(weights, parts)
        model = model.model_copy(update={"vocab_size": found.vocab_size})
    ours = hf_names.from_huggingface(weights, model)
    data = DataConfig(masking=MaskingConfig(strategy="causal" if causal else "token"))
    return Foreign(folder, Config(model=model, data=data), ours, found, tuple(initialised), tuple(ignored))


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds weights as Hugging Face names them, in one file or several."""
    return any((folder / name).is_file() for w in WEIGHTS for name in (w, f"{w}.index.json"))


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


def read_weights(folder: Path, model: ModelConfig) -> tuple[Path, dict[str, Tensor]]:
    """The weights file of a folder and its tensors, fp32, under Hugging Face's present names for a class with heads.

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
            with warnings.catch_warnings(action="ignore"):  # about the pickle's age; an error says what counts
                found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            found = load_file(path)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        raise ValueError(
            f"{path}: holds more than tensors, and a pickle can hold code: nothing of it was run ({reason.strip():.120})"
        ) from None
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
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
        tensors[present_name(name, hf_names.prefix_of(model))] = tensor.float()
    return path, tensors


def present_name(name: str, prefix: str = "bert.") -> str:
    """A tensor's name as today's class with pre-training heads has it, whose encoder's begin with `prefix`."""
    for old, new in RENAMED.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return prefix + name if name.startswith(ENCODER) else name


def complete(
    tensors: Mapping[str, Tensor], model: ModelConfig, where: str
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """The tensors of a whole model under Hugging Face's names; the heads that were made, and the names left out.

    Raises ValueError naming the tensor that is missing, of another shape, or that says that the decoder is not tied.
    """
    if model.layers > len(tensors):  # before anything of that size is built
        raise ValueError(f"{where}: has too few tensors for num_hidden_layers={model.layers}")
    left = dict(tensors)
    if model.modern:
        tied_to, decoder_name = "model.embeddings.tok_embeddings.weight", hf_modern.DECODER
    else:
        tied_to, decoder_name = "bert.embeddings.word_embeddings.weight", f"{DECODER}weight"
        bias = left.pop(f"{DECODER}bias", None)
        if bias is not None and not left.setdefault("cls.predictions.bias", bias).equal(bias):
            raise ValueError(f"{where}: {DECODER}bias is not cls.predictions.bias, as in a tied model")
    decoder = left.pop(decoder_name, None) if model.tied else None
    embedding = left.get(tied_to)
    if decoder is not None and embedding is not None and not decoder.equal(embedding):
        raise ValueError(
            f"{where}: {DECODER}weight is not the word embedding, and {CONFIG} does not say tie_word_embeddings=false"
        )
    shapes = their_shapes(model)
    made = []
    torch.manual_seed(Config().seed)
    for head, prefixes in HEADS.items():
        names = [name for name in shapes if name.startswith(prefixes)]
        if names and not any(name in left for name in names):
            left |= {name: initial(name, shapes[name], model.init_std) for name in names}
            made.append(head)
    weights = {}
    for name, shape in shapes.items():
        if name not in left:
            raise ValueError(f"{where}: no tensor named {name}, which its config asks for")
        weights[name] = left.pop(name)
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{where}: {name} is {list(weights[name].shape)}, its config says {list(shape)}")
    return weights, made, sorted(left)


def their_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by Hugging Face's name."""
    ours = {name: tuple(p.shape) for name, p in outline(model).named_parameters()}
    shapes = {}
    for theirs, name in hf_names.expected(model).items():
        first, *rest = ours[name]
        if name.startswith("embeddings.word."):
            first = model.vocab_size
        stacked = ".qkv." in name and not model.modern
        shapes[theirs] = (first // 3 if stacked else first, *rest)
    return shapes


def initial(name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """How a new model begins (Devlin et al. 2019): norms as the identity, biases at zero, matrices truncated-normal."""
    if name.endswith(("LayerNorm.weight", "norm.weight")):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std)


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer; of a WordPiece tokenizer.json, what its vocab.txt would be.

    Raises ValueError when there is none or it cannot be expressed.
    """
    for name in TOKENIZERS:
        if (folder / name).is_file():
            return Tokenizer.load(folder / name)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder}: holds no tokenizer (vocab.txt, tokenizer.model); name one with --tokenizer")
    tree = read_json(path)
    model = tree.get("model")
    model = model if isinstance(model, dict) else {}
    settings = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": CONTINUATION}
    for field, want in (settings | {"max_input_chars_per_word": MAX_WORD}).items():
        if (found := model.get(field)) != want:
            raise ValueError(
                f"{path}: model.{field} is {found!r:.40}, only {want!r} can be taken; name the tokenizer's own "
                "file with --tokenizer"
            )
    for part, kind in PARTS.items():
        stage = tree.get(part)
        found = stage.get("type") if isinstance(stage, dict) else None
        if found != kind:
            raise ValueError(
                f"{path}: {part} is {found!r:.40}, only {kind} can be taken; name the tokenizer's own file with "
                "--tokenizer"
            )
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or sorted(vocabulary.values(), key=repr) != sorted(
        range(len(vocabulary)), key=repr
    ):
        raise ValueError(f"{path}: model.vocab does not number its pieces 0, 1, 2, …")
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    if any("\n" in piece for piece in pieces):
        raise ValueError(f"{path}: model.vocab has a piece with a line end in it, which a vocab.txt cannot hold")
    return Tokenizer.parse("".join(f"{piece}\n" for piece in pieces).encode(), path, _casing(tree["normalizer"], path))


def _casing(normalizer: dict[str, Any], path: Path) -> dict[str, bool | None]:
    """What a tokenizer.json's BertNormalizer does, by the fields of `Casing`."""
    fields = {"lowercase": "lowercase", "strip_accents": "strip_accents", "ideographs": "handle_chinese_chars"}
    said = {name: normalizer.get(field) for name, field in fields.items()}
    for name, value in said.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{path}: normalizer.{fields[name]} is {value!r:.40}, must be true or false")
    return said

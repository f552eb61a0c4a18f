"""Reader of trained models: a run's newest checkpoint or a Hugging Face folder, with config and tokenizer.

Weights, config and tokenizer belong together or nothing is loaded. Of a run only committed checkpoints are read and no lock is
taken, so it may continue training. A Hugging Face folder is read as data: none of its code is run, and what is not understood
is refused by name.
"""

from __future__ import annotations

import errno
import hashlib
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megabert import checkpoint, config
from megabert.common.files import atomic_folder, canonical, parse_object
from megabert.common.logs import log
from megabert.common.run_files import CONFIG, TOKENIZER_FILES
from megabert.config import Config, DataConfig, MaskingConfig, ModelConfig, OpsConfig, replace
from megabert.data.shards import Manifest
from megabert.data.tokenizer import CONTINUATION, MAX_WORD, Tokenizer, checked_casing, refuse_other_tokenizer
from megabert.data.tokenizer_json import NORMALIZER, added_tokens_beside, bert_normalizer, renamed_beside
from megabert.hf import mapping, relatives
from megabert.hf.hub import INDEX, WEIGHT_FILES, is_model_folder, model_folder, refuse_finetuned, weights_in
from megabert.model import BertForPreTraining, meta_model, truncated_normal

# tokenizer files in a Hugging Face folder
TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json")
LARGEST_JSON = 256 << 20
# Embeddings behind the tokenizer's last one, as of a vocabulary padded to a multiple of up to this number, are left out; more only
# on request.
MOST_PADDING = 128
# prefixes of tensors in a class without heads
ENCODER = ("embeddings.", "emb_ln.", "embed_tokens.", "encoder.", "pooler.", "layers.", "final_norm.", "norm.")
# heads, and the prefixes of their tensors
MLM_HEAD, POOLER, NSP_HEAD = "masked-LM head", "pooler", "next-sentence head"
HEADS = {
    MLM_HEAD: ("cls.predictions.", "head.", "decoder.", "lm_head."),
    POOLER: ("bert.pooler.",),
    NSP_HEAD: ("cls.seq_relationship.",),
}
# parts of a WordPiece tokenizer.json, and fields of its model
WORDPIECE = {"unk_token": "[UNK]", "continuing_subword_prefix": CONTINUATION, "max_input_chars_per_word": MAX_WORD}
STAGES = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer"}
# names of these heads' parameters in ours
OUR_HEADS = {MLM_HEAD: "mlm.", POOLER: "pooler.", NSP_HEAD: "nsp."}
# entry in the state of a run of step 0: `Pretrained.initialised`
INITIALISED = "initialised"
# layers that fine-tuning adds
ADDED = ("classifier.", "qa_outputs.")
# parts of names in the first releases, and in the state dict of a compiled module
RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
COMPILED = "_orig_mod."


@dataclass(frozen=True)
class Pretrained:
    """`weights` are fp32 by parameter name; `state` are the other entries of the checkpoint; `run_dir` is its folder.

    `initialised` are heads that are those of a new model, since a Hugging Face folder did not have them, also after it was written
    as a run; `ignored` are its tensors for which ours has no place. `changed`: the weights are no longer those of `run_dir`.
    """

    run_dir: Path
    weights: dict[str, Tensor]
    state: dict[str, Any]
    config: Config
    tokenizer: Tokenizer
    initialised: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    changed: bool = False

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def left_out(self) -> str:
        """The names of the first of `ignored`."""
        return ", ".join(self.ignored[:4]) + ", …" * (len(self.ignored) > 4)

    @property
    def trained_weights(self) -> dict[str, Tensor]:
        """The weights without those of heads that are `initialised` as a whole."""
        new = tuple(OUR_HEADS[head] for head in self.initialised if head in OUR_HEADS)
        return {name: tensor for name, tensor in self.weights.items() if not name.startswith(new)}

    def with_weights(self, weights: dict[str, Tensor]) -> Pretrained:
        """The model with other weights; a head whose weights changed is trained."""
        changed = [name for name, weight in weights.items() if not weight.equal(self.weights[name])]

        def is_new(head: str) -> bool:
            prefix = OUR_HEADS[head.partition(" (")[0]]
            return not any(name.startswith(prefix) for name in changed)

        new = tuple(filter(is_new, self.initialised))
        return replace_fields(self, weights=weights, initialised=new, changed=self.changed or bool(changed))

    def model(self, device: torch.device, dtype: torch.dtype = torch.float32) -> BertForPreTraining:
        """The model without dropout."""
        causal = self.config.data.masking.causal
        built = BertForPreTraining(self.config.model, OpsConfig(), device.type, dtype, causal)
        built.load_state_dict(self.weights)
        return built.to(device, dtype).eval()

    def refuse_without_mlm_head(self) -> None:
        """Raises ValueError for a model whose weights are not those of a language model."""
        if any(head.startswith(MLM_HEAD) for head in self.initialised):
            raise ValueError(
                f"{self.run_dir}: has no {MLM_HEAD} (cls.predictions…), so it predicts no words; name another"
            )

    def language_model(self, device: torch.device, dtype: torch.dtype = torch.float32) -> BertForPreTraining:
        """`model`, to predict words. Raises as `refuse_without_mlm_head`."""
        self.refuse_without_mlm_head()
        return self.model(device, dtype)


def load(source: str | Path, tokenizer: str | Path = "") -> Pretrained:
    """The newest whole checkpoint of a run folder, or one checkpoint folder, or a Hugging Face BERT folder, or a model of the hub.

    The tokenizer is the file `tokenizer`, or lies in the folder, or in the dataset the run was trained on. Raises ValueError
    naming what is missing or does not belong to the rest.
    """
    path = model_folder(source)
    refuse_finetuned(path, source)
    if is_model_folder(path):
        return read(path, tokenizer)
    run_dir = path.resolve().parents[1] if (path / "manifest.json").is_file() else path
    newest = checkpoint.newest_step(path)
    while True:
        try:
            weights, state = checkpoint.load_weights(path)
            break
        except (ValueError, OSError):  # the run that is training may have removed it for a newer one
            before, newest = newest, checkpoint.newest_step(path)
            if newest == before:
                raise
    try:
        cfg = config.config_at(config.from_dict(state["config"]), state)
        sha256 = str(state["tokenizer"])
    except (KeyError, TypeError):
        raise ValueError(f"{source}: its checkpoint has no model config or tokenizer") from None
    found = _tokenizer_of_run(run_dir, cfg, sha256, tokenizer)
    if found.vocab_size != cfg.model.vocab_size:
        raise ValueError(f"{found.path}: {found.vocab_size} tokens, but the model has {cfg.model.vocab_size}")
    # of a folder that `write_run` wrote; training trains all heads
    initialised = state.get(INITIALISED, ()) if state["step"] == 0 else ()
    return Pretrained(run_dir, weights, state, cfg, found, tuple(initialised))


def _tokenizer_of_run(run_dir: Path, cfg: Config, sha256: str, named: str | Path) -> Tokenizer:
    if named:
        tokenizer = Tokenizer.load(named)
        if tokenizer.sha256 != sha256:
            raise ValueError(f"{named}: is not the tokenizer that {run_dir} was trained with (its SHA-256 differs)")
        return tokenizer
    candidates = [run_dir / name for name in TOKENIZER_FILES]
    if cfg.data.path and Path(cfg.data.path, "manifest.json").is_file():
        candidates.append(Path(cfg.data.path) / Manifest.load(cfg.data.path).tokenizer["file"])
    for path in candidates:
        if path.is_file() and (tokenizer := Tokenizer.load(path)).sha256 == sha256:
            return tokenizer
    raise ValueError(
        f"{run_dir}: its tokenizer is neither in it nor in its dataset {cfg.data.path or '(none)'}; "
        "name the file with --tokenizer"
    )


def write_run(pretrained: Pretrained, run: str | Path, files: Mapping[str, bytes] | None = None, **state: Any) -> None:
    """Write the model as the only checkpoint, of step 0, of a new run folder: to evaluate, export or fine-tune, or to begin a run with
    (`init_from`). `files`: others in the folder, by name; `state`: changed entries of its state. Raises ValueError for a folder that is
    not empty."""
    entries = {name: value for name, value in pretrained.state.items() if name not in ("step", INITIALISED)} | state
    entries |= {INITIALISED: list(pretrained.initialised)} if pretrained.initialised else {}
    with atomic_folder(run, CONFIG) as new:
        for name, data in {**pretrained.tokenizer.files(), **(files or {})}.items():
            (new / name).write_bytes(data)
        checkpoint.write_start(new, pretrained.weights, entries)
        (new / CONFIG).write_bytes(canonical(entries))


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and values."""
    sha256 = hashlib.sha256()
    for name in sorted(weights):
        sha256.update(name.encode())
        sha256.update(weights[name].contiguous().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def read(
    folder: Path, tokenizer: str | Path = "", nsp: Sequence[str] = (POOLER, NSP_HEAD), drop: bool = False
) -> Pretrained:
    """The model and tokenizer of a Hugging Face BERT folder; the tokenizer may be the file `tokenizer`.

    Missing heads are initialised as in a new model. Without any of the heads `nsp`, and in a causal model, there is neither pooler
    nor next-sentence head. `drop`: leave out any number of embeddings behind those of the tokenizer. The state is that of a checkpoint
    of step 0. Raises ValueError naming what cannot be converted; no code of the folder is run.
    """
    config_file = folder / CONFIG
    tree = read_json(config_file)
    if relative := relatives.of_config(tree):
        tree = relatives.upgrade_legacy_config(relative, tree, str(config_file))
    model = mapping.from_huggingface_config(tree, str(config_file))
    causal = mapping.is_causal(tree, str(config_file))
    file, tensors = read_weights(folder, model, relative.names if relative else {})
    tensors |= relative.zeros(tensors) if relative else {}
    prefixes = tuple(prefix for head in nsp for prefix in HEADS[head])
    model = replace(model, "nsp", model.nsp and not causal and any(n.startswith(prefixes) for n in tensors))
    weights, initialised, ignored = complete(tensors, model, str(file))
    found = named_tokenizer(tokenizer or folder)
    if not tokenizer and (found.kind == "wordpiece" or found.path.name == "vocab.txt"):
        refuse_other_tokenizer(tree, config_file)
    tokens, rows = found.vocab_size, model.vocab_size
    if tokens > rows or (rows - tokens >= MOST_PADDING and not drop):
        more = f"megabert convert --drop-embeddings leaves the last {rows - tokens:,} out"
        if tokens > rows:
            more = f"it has no embeddings of {', '.join(repr(token.strip())[:40] for token in found.tokens[rows:][:4])}"
        raise ValueError(f"{found.path}: {tokens} tokens, but {config_file} says vocab_size={rows}; {more}")
    if tokens < rows:
        model = replace(model, "vocab_size", tokens)
        weights = mapping.of_tokens(weights, model)
        ignored = [*ignored, f"the embeddings of ids {tokens:,} to {rows - 1:,}, which have no tokens"]
    ours = mapping.from_huggingface(weights, model)
    data = DataConfig(masking=MaskingConfig(strategy="causal" if causal else "token"))
    cfg = Config(model=model, data=data)
    state = start_state(folder, cfg, found)
    if guess := found.guess():
        log.warning(guess)
    return Pretrained(folder, ours, state, cfg, found, tuple(initialised), tuple(ignored))


def start_state(source: Path, cfg: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """The state in a checkpoint of step 0 whose weights are those of `source`, converted."""
    return {
        "step": 0,
        "config": cfg.model_dump(),
        "config_sha256": cfg.digest(),
        "dataset": f"none, converted from {source.resolve().name}: begin a new run with init_from",
        "tokenizer": tokenizer.sha256,
        "seconds": 0.0,
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file when it holds none."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path}: not found") from None
    if size > LARGEST_JSON:
        raise ValueError(f"{path}: not valid JSON (is too large)")
    return parse_object(path.read_bytes(), path)


def read_weights(folder: Path, model: ModelConfig, renamed: Mapping[str, str]) -> tuple[Path, dict[str, Tensor]]:
    """The weights file of a folder, or its index of several, and the tensors, fp32, under Hugging Face's present names for a class
    with heads. `renamed` as of `present_name`.

    Raises ValueError for a folder without weights, a damaged file, a pickle with anything but tensors in it (which is
    not run), and a tensor that is not a floating-point one.
    """
    path = next(iter(weights_in(folder)), None)
    if path is None:
        raise ValueError(f"{folder}: holds no {' and no '.join(WEIGHT_FILES)}, so no weights")
    tensors: dict[str, Tensor] = {}
    for part in _parts(path):
        loaded = _load(part)
        if any(COMPILED in name for name in loaded):
            log.warning(f"{part}: names contain {COMPILED} (torch.compile); they are read without it")
        for name, tensor in loaded.items():
            if name.endswith(mapping.BUFFERS):
                continue  # buffers that count up, saved by old versions
            dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
            if not dense or not tensor.is_floating_point():
                raise ValueError(f"{part}: {name} is not a floating-point tensor; save the model unquantised")
            tensor = tensor.detach().float()
            checkpoint.refuse_non_finite({name: tensor}, part)
            present = present_name(name, mapping.find_family(model).encoder, renamed)
            if not tensors.setdefault(present, tensor).equal(tensor):
                raise ValueError(f"{part}: {name} is there twice, with other values; remove one of the two")
    return path, tensors


def _parts(path: Path) -> list[Path]:
    """The files of weights: one, or those of an index. Raises ValueError naming one that is missing."""
    if not path.name.endswith(INDEX):
        return [path]
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path}: weight_map names no files")
    parts = [path.parent / Path(file).name for file in sorted(set(files.values()))]
    for part in parts:
        if not part.is_file():
            raise ValueError(f"{part}: not found, but {path.name} names it")
    return parts


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".bin":
            with warnings.catch_warnings(action="ignore"):  # about the pickle's age
                tensors = torch.load(path, map_location="cpu", weights_only=True)
        else:
            tensors = load_file(path)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        raise ValueError(
            f"{path}: holds more than tensors, and a pickle can hold code: nothing of it was run ({reason.strip():.120})"
        ) from None
    except Exception as error:  # a damaged pickle raises errors of any kind, a seek before its start EINVAL
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path}: cannot be read as weights ({first:.120})") from None
    if not isinstance(tensors, dict) or not all(isinstance(k, str) for k in tensors):
        raise ValueError(f"{path}: holds no tensors by name")
    return tensors


def present_name(name: str, prefix: str, renamed: Mapping[str, str]) -> str:
    """A tensor's name in today's class with pre-training heads, whose encoder has `prefix`; `renamed`: further parts to replace."""
    for old, new in ({COMPILED: ""} | RENAMED | dict(renamed)).items():
        name = name.replace(old, new)
    return prefix + name if name.startswith(ENCODER) else name


def complete(
    tensors: Mapping[str, Tensor], model: ModelConfig, where: str
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """The tensors of a whole model under Hugging Face's names; the heads that were initialised, in whole or, beside a layer that
    fine-tuning added, in part; and the names left out.

    Raises ValueError naming the tensor that is missing, of another shape, or that shows that the decoder is not tied.
    """
    if model.layers > len(tensors):  # before anything of that size is built
        raise ValueError(f"{where}: has too few tensors for num_hidden_layers={model.layers}")
    left = dict(tensors)
    family = mapping.find_family(model)
    embedding, decoder = family.embeddings["embeddings.word.weight"], family.decoder
    bias, original = left.pop(family.bias_copy, None), family.head.get("embeddings.word.bias", "")
    if bias is not None and not model.tied:
        left[original] = bias  # the one that an untied decoder adds
    if bias is not None and not left.setdefault(original, bias).equal(bias):
        raise ValueError(f"{where}: {family.bias_copy} is not {original}, as in a tied model")
    if model.tied and embedding in left and not left.pop(decoder, left[embedding]).equal(left[embedding]):
        raise ValueError(
            f"{where}: {decoder} is not the word embedding, and {CONFIG} does not say tie_word_embeddings=false"
        )
    shapes, tuned = their_shapes(model), any(name.startswith(ADDED) for name in left)
    initialised = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Config().seed)
        for head, prefixes in HEADS.items():
            names = [name for name in shapes if name.startswith(prefixes)]
            missing = [name for name in names if name not in left]
            if missing and (missing == names or tuned):
                left |= {name: initial(name, shapes[name], model.init_std) for name in missing}
                initialised.append(head if missing == names else f"{head} ({', '.join(missing)})")
    weights = {}
    for name, shape in shapes.items():
        if name not in left:
            raise ValueError(f"{where}: no tensor named {name}, which its config asks for")
        weights[name] = left.pop(name)
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{where}: {name} is {list(weights[name].shape)}, its config says {list(shape)}")
    inside = sorted(name for name in left if name.startswith(f"{family.layers}.") and not name.endswith("inv_freq"))
    if inside:
        raise ValueError(
            f"{where}: {inside[0]} is part of a layer, which ours has not; merge it into the weights first"
        )
    return weights, initialised, sorted(left)


def their_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by Hugging Face's name, without copies."""
    written = mapping.to_huggingface(meta_model(model).state_dict(), model)
    return {theirs: tuple(written[theirs].shape) for parts in mapping.names(model).values() for theirs in parts}


def initial(name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Initial values (Devlin et al. 2019): norms as the identity, biases at zero, matrices truncated-normal."""
    if name.endswith(("LayerNorm.weight", "norm.weight")):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    return truncated_normal(shape, std)


def named_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that is a file, or lies in a model's folder or a dataset. Raises ValueError where there is none, or where
    it is not known how it normalises text."""
    path = Path(path)
    if path.is_dir() and (path / "manifest.json").is_file():
        path = path / Manifest.load(path).tokenizer["file"]
    tokenizer = read_tokenizer(path) if path.is_dir() else Tokenizer.load(path)
    if doubt := tokenizer.doubt():
        raise ValueError(f'{doubt}; put {{"do_lower_case": false}} (or true, and "strip_accents") into one there')
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer; a WordPiece tokenizer.json without added tokens is read as the vocab.txt that it contains.

    Beside a tokenizer.json a SentencePiece model of another than our name has other ids (XLM-RoBERTa's, CamemBERT's).

    Raises ValueError when there is none or it cannot be expressed.
    """
    path = folder / "tokenizer.json"
    for name in TOKENIZERS:
        if (folder / name).is_file() and (name in TOKENIZER_FILES or not path.is_file()):
            return Tokenizer.load(folder / name)
    if not path.is_file():
        raise ValueError(
            f"{folder}: holds no tokenizer (vocab.txt, tokenizer.model, tokenizer.json, vocab.json); name one with --tokenizer"
        )
    tree = read_json(path)
    model = tree.get("model")
    model = model if isinstance(model, dict) else {}
    # text of which BERT's cleaning drops nothing, unlike that of a vocab.txt
    kept = isinstance(tree.get("normalizer"), dict) and tree["normalizer"].get("clean_text") is False
    if model.get("type") != "WordPiece" or kept or added_tokens_beside(path) or renamed_beside(path):
        return Tokenizer.load(path)
    tree["normalizer"] = bert_normalizer(tree, path)
    expected = {f"model.{name}": (model.get(name), want) for name, want in WORDPIECE.items()}
    for part, kind in STAGES.items():
        stage = tree.get(part)
        expected[part] = stage.get("type") if isinstance(stage, dict) else None, kind
    for field, (found, want) in expected.items():
        if found != want:
            raise ValueError(
                f"{path}: {field} is {found!r:.40}, only {want!r} is supported; name the tokenizer's own file with "
                "--tokenizer"
            )
    vocabulary: Any = model.get("vocab")
    numbers = set(map(repr, vocabulary.values())) if isinstance(vocabulary, dict) else set()
    if not numbers or numbers != set(map(repr, range(len(vocabulary)))):
        raise ValueError(f"{path}: model.vocab does not number its tokens 0, 1, 2, …")
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if any("\n" in token for token in tokens):
        raise ValueError(f"{path}: model.vocab has a token with a line end in it, which a vocab.txt cannot hold")
    values = {name: tree["normalizer"].get(field) for name, field in NORMALIZER.items()}
    casing = checked_casing(values, NORMALIZER, str(path), "normalizer.")
    return Tokenizer.parse("".join(f"{token}\n" for token in tokens).encode(), path, casing)

"""Make a Hugging Face BERT folder a run folder to continue pre-training from.

python -m megabert.convert --model HF_DIR --run DIR
python -m data_prep build --tokenizer DIR/vocab.txt …
python megabert/train.py --config DIR/config.toml --data DATA --run NEW_RUN
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from megabert import checkpoint, foreign, huggingface
from megabert.config import Config, ModelConfig, OpsConfig
from megabert.folder import appearing
from megabert.model import BertForPreTraining
from megabert.tokenizer import Tokenizer

HEADS = {
    "cls.predictions.": "masked-LM head",
    "bert.pooler.": "pooler",
    "cls.seq_relationship.": "next-sentence head",
}
DECODER = "cls.predictions.decoder."


@dataclass
class Converted:
    """`initialised`: heads that the folder did not have; `ignored`: its tensors that ours has no place for."""

    model: ModelConfig
    tokenizer_file: Path
    initialised: list[str]
    ignored: list[str]
    warnings: list[str] = field(default_factory=list)


def convert(source: str | Path, run: str | Path, tokenizer: str | Path = "", nsp: bool = True) -> Converted:
    """Write `run`: a checkpoint of step 0, a config.toml that starts from it, and the tokenizer's file.

    Heads that are missing are initialised as in a new model; with `nsp` false pooler and next-sentence head are left
    out. Raises ValueError naming what cannot be converted; nothing is written then and nothing of the folder is run.
    """
    folder, run = Path(source), Path(run)
    if not folder.is_dir():
        raise ValueError(f"{source}: no such folder; name one with {foreign.CONFIG} and {foreign.WEIGHTS[0]}")
    config_file = folder / foreign.CONFIG
    tree = foreign.read_json(config_file)
    model = huggingface.from_huggingface_config(tree, str(config_file)).model_copy(update={"nsp": nsp})
    file, tensors = foreign.read_weights(folder)
    weights, initialised, ignored = complete(tensors, model, str(file))
    if tokenizer:
        kind, data = Tokenizer.load(tokenizer).kind, Path(tokenizer).read_bytes()
        name = "vocab.txt" if kind == "wordpiece" else "tokenizer.model"
    else:
        name, data = foreign.tokenizer_bytes(folder)
    config = Config(model=model)
    with appearing(run, "config.toml") as new:
        (new / name).write_bytes(data)
        found = Tokenizer.load(new / name)
        if found.vocab_size != model.vocab_size:
            raise ValueError(
                f"{tokenizer or folder}: its tokenizer has {found.vocab_size} pieces, but {config_file} says "
                f"vocab_size={model.vocab_size}"
            )
        state = {
            "config": config.model_dump(),
            "config_sha256": config.digest(),
            "dataset": f"none, converted from {folder.resolve().name}: begin a new run with init_from",
            "tokenizer": found.sha256,
            "seconds": 0.0,
        }
        checkpoint.write_start(new, huggingface.from_huggingface(weights, model), state)
        (new / "config.json").write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
        (new / "config.toml").write_text(toml(model, run.resolve()))
        warning = foreign.case_warning(folder, found)
    return Converted(model, run / name, initialised, ignored, [warning] if warning else [])


def complete(
    tensors: Mapping[str, Tensor], model: ModelConfig, where: str
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """The tensors of a whole model under Hugging Face's names; the heads that were made, and the names left out.

    Raises ValueError naming the tensor that is missing, of another shape, or that says that the decoder is not tied.
    """
    if model.layers > len(tensors):  # before anything of that size is built
        raise ValueError(f"{where}: has too few tensors for num_hidden_layers={model.layers}")
    left = dict(tensors)
    bias = left.pop(f"{DECODER}bias", None)
    if bias is not None and not left.setdefault("cls.predictions.bias", bias).equal(bias):
        raise ValueError(f"{where}: {DECODER}bias is not cls.predictions.bias, as in a tied model")
    decoder = left.pop(f"{DECODER}weight", None)
    embedding = left.get("bert.embeddings.word_embeddings.weight")
    if decoder is not None and embedding is not None and not decoder.equal(embedding):
        raise ValueError(
            f"{where}: {DECODER}weight is not the word embedding; only tied models can be converted"
        )
    shapes = their_shapes(model)
    made = []
    torch.manual_seed(Config().seed)
    for prefix, head in HEADS.items():
        names = [name for name in shapes if name.startswith(prefix)]
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
    plain = OpsConfig(attention="sdpa", mlm_loss="torch", layer="torch")
    with torch.device("meta"):
        ours = {name: tuple(p.shape) for name, p in BertForPreTraining(model, plain).named_parameters()}
    shapes = {}
    for theirs, name in huggingface.expected(model).items():
        first, *rest = ours[name]
        if name.startswith("embeddings.word."):
            first = model.vocab_size
        shapes[theirs] = (first // 3 if ".qkv." in name else first, *rest)
    return shapes


def initial(name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """How a new model begins (Devlin et al. 2019): norms as the identity, biases at zero, matrices truncated-normal."""
    if name.endswith("LayerNorm.weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std)


def toml(model: ModelConfig, run: Path) -> str:
    """A configuration that starts from `run`; all else is the default and the command line's."""
    lines = [f"init_from = {json.dumps(str(run), ensure_ascii=False)}", "", "[model]"]
    return (
        "\n".join(lines + [f"{key} = {json.dumps(value)}" for key, value in model.model_dump().items()])
        + "\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megabert.convert", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json and model.safetensors or pytorch_model.bin")
    add("--run", required=True, help="run folder to write; must not exist or be empty")
    add("--tokenizer", default="", help="vocab.txt or SentencePiece model, where the folder has none")
    add("--no-nsp", action="store_true", help="leave out pooler and next-sentence head")
    args = parser.parse_args(argv)
    try:
        done = convert(args.model, args.run, args.tokenizer, not args.no_nsp)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for text in done.warnings:
        print(f"warning: {args.model}: {text}", file=sys.stderr)
    if done.initialised:
        print(f"not in {args.model}, so initialised as in a new model: {', '.join(done.initialised)}")
    if done.ignored:
        shown = ", ".join(done.ignored[:4]) + (", …" if len(done.ignored) > 4 else "")
        print(f"left out, as pre-training has no place for them: {shown}")
    model = done.model
    print(f"{args.run}: {model.layers} layers of {model.hidden}, {model.vocab_size:,} pieces. To go on:")
    print(f"  python -m data_prep build --tokenizer {done.tokenizer_file} --input PATH… --output DATA")
    print(f"  python megabert/train.py --config {Path(args.run, 'config.toml')} --data DATA --run NEW_RUN")
    return 0


if __name__ == "__main__":
    sys.exit(main())

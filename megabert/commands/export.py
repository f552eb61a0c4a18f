"""A run, one of its checkpoints, or a fine-tuned model as a Hugging Face folder that loads without this package.

megabert export --model RUN --output HF_DIR
megabert export --model RUN --output HF_DIR --sentence-transformers mean
megabert export --model FINETUNED/seed1/best --output HF_DIR
megabert export --model FINETUNED/seed1/best --output HF_DIR --onnx
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megabert.common.arguments import MODEL, TOKENIZER, Parser, called_as, refuse_missing
from megabert.common.errors import OK, code_of, command
from megabert.common.files import appearing, refuse_existing, write_tensors
from megabert.common.hub import located
from megabert.common.logs import log

if TYPE_CHECKING:
    from megabert.hf import Pretrained

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def export(
    run: str | Path, output: str | Path, tokenizer: str | Path = "", overwrite: bool = False, pool: str = ""
) -> Pretrained:
    """`write` of a run's newest complete checkpoint, or of one checkpoint; returns it."""
    from megabert import hf

    pretrained = hf.load(run, tokenizer)
    write(pretrained, output, overwrite, pool)
    return pretrained


def write(pretrained: Pretrained, output: str | Path, overwrite: bool = False, pool: str = "") -> None:
    """Write config, weights, tokenizer and model card.

    `pool`: "mean" or "cls" adds the files of sentence-transformers, for pooled vectors of length 1. Raises ValueError naming what
    cannot be exported or a wrong `output`, without writing anything.
    """
    from megabert.hf import mapping, model_card, sentence_folder, tokenizer_files

    model = pretrained.config.model
    family = mapping.family_of(model)
    config = mapping.to_huggingface_config(
        model, pretrained.config.data.masking.causal, pretrained.tokenizer.special_ids
    )
    card = model_card.render(pretrained, Path(output).resolve().name, config["architectures"][0])
    weights = mapping.to_huggingface(pretrained.weights, model)
    files = tokenizer_files.files(pretrained.tokenizer, model.max_positions, model.segmented)
    files |= {CONFIG: tokenizer_files.as_json(config), "README.md": card.encode()}
    if pool:
        files |= sentence_folder.files(pretrained.config, pool)
    with appearing(output, CONFIG, overwrite) as folder:
        for file, data in files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
        # of the embedding and of the head's bias
        copies = (family.decoder, family.bias_copy) if model.tied else ()
        whole = {name: tensor.contiguous() for name, tensor in weights.items() if name not in copies}
        write_tensors(folder / WEIGHTS, whole, {"format": "pt"})


def export_finetuned(args: argparse.Namespace) -> None:
    """Write config, weights, tokenizer and card of a fine-tuned model, and on request ONNX files.

    Raises ValueError naming what cannot be exported, without writing anything.
    """
    from megabert.finetune import huggingface, onnx

    finetuned = huggingface.load(args.model)
    described = finetuned.described
    if args.onnx:
        onnx.require()
    with appearing(args.output, CONFIG, args.overwrite) as folder:
        huggingface.write(finetuned, folder)
        (folder / "README.md").write_text(huggingface.card(finetuned, Path(args.output).resolve().name))
        difference = onnx.write(described, folder) if args.onnx else None
    log.info(f"{args.output}: {huggingface.architecture(described)} for {described.task.name}")
    if difference is not None:
        log.info(f"onnx/{onnx.WHOLE}: logits within {difference:.1e} of the model's")


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.commands.export"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=f"{MODEL}; or a fine-tuned model's folder or name")
    add("--output", required=True, metavar="HF_DIR", help="folder to write; must not exist or be empty")
    add("--tokenizer", default="", metavar="FILE", help=TOKENIZER)
    add("--overwrite", action="store_true", help="replace an exported folder")
    pools = "a folder for sentence-transformers: vectors of texts, the mean of all tokens' or that of [CLS]"
    add("--sentence-transformers", default="", choices=("mean", "cls"), help=pools)
    add("--onnx", action="store_true", help="for a fine-tuned model: also onnx/model.onnx, checked in onnxruntime")
    args = parser.parse_args(argv)
    refuse_missing(args, "tokenizer")
    args.model = str(located(args.model))
    refuse_existing(Path(args.output), CONFIG, args.overwrite)
    from megabert.finetune import tasks

    if tasks.find(args.model):
        for option in ("tokenizer", "sentence_transformers"):
            if getattr(args, option):
                raise ValueError(f"--{option.replace('_', '-')}: is for runs; {args.model} is a fine-tuned model")
        export_finetuned(args)
        return OK
    if args.onnx:
        raise ValueError(f"--onnx: is for fine-tuned models; {args.model} has no {tasks.DESCRIPTION}")
    from megabert.hf import mapping

    pool = args.sentence_transformers
    pretrained = export(args.model, args.output, args.tokenizer, args.overwrite, pool)
    model, causal = pretrained.config.model, pretrained.config.data.masking.causal
    architecture = mapping.to_huggingface_config(model, causal)["architectures"][0]
    kind = f"a SentenceTransformer of {pool} vectors" if pool else architecture
    log.info(f"{args.output}: {kind} of step {pretrained.step:,}, {model.vocab_size:,} tokens")
    if causal:
        log.info("the run is causal: its class is a decoder (is_decoder=true), as is AutoModelForCausalLM")
    elif mapping.family_of(model).nsp and not (model.nsp or pool):
        log.info("the run has no next-sentence head, so BertForPreTraining and the pooler would start untrained")
    return OK


if __name__ == "__main__":
    sys.exit(code_of(main))

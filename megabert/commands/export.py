"""Export a run, one of its checkpoints, or a fine-tuned model as a Hugging Face folder that loads without any code of ours.

megabert export --model RUN --output HF_DIR
megabert export --model FINETUNED/seed1/best --output HF_DIR
megabert export --model FINETUNED/seed1/best --output HF_DIR --onnx --int8 dev.tsv
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megabert import hf as pretrained
from megabert.common.arguments import Parser, called_as
from megabert.common.atomic_io import appearing
from megabert.common.errors import OK, code_of, command
from megabert.common.logs import log
from megabert.common.tensor_file import write_tensors
from megabert.finetune import card, huggingface, onnx, save
from megabert.finetune.save import Finetuned
from megabert.hf import Pretrained, hf_names, hf_tokenizer, model_card

CONFIG, WEIGHTS = "config.json", "model.safetensors"
COPIES = (
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
)  # of the embedding and of the head's bias, where these are tied


def export(run: str | Path, output: str | Path, tokenizer: str | Path = "", overwrite: bool = False) -> Pretrained:
    """Write config, weights, tokenizer and model card of a run's newest whole checkpoint (or of that one
    checkpoint).

    Raises ValueError naming what cannot be exported or where `output` cannot be; nothing is written then.
    """
    found = pretrained.load(run, tokenizer)
    model = found.config.model
    config = hf_names.to_huggingface_config(model, found.config.data.masking.causal)
    weights = hf_names.to_huggingface(found.weights, model)
    files = hf_tokenizer.files(found.tokenizer, model.max_positions, not model.modern)
    files[CONFIG] = hf_tokenizer.as_json(config)
    name = Path(output).resolve().name
    files["README.md"] = model_card.render(found, name, config["architectures"][0]).encode()
    with appearing(output, CONFIG, overwrite) as folder:
        for file, data in files.items():
            (folder / file).write_bytes(data)
        copies = COPIES if model.tied else ()
        whole = {name: tensor.contiguous() for name, tensor in weights.items() if name not in copies}
        write_tensors(folder / WEIGHTS, whole, {"format": "pt"})
    return found


def export_finetuned(
    source: str | Path, output: str | Path, overwrite: bool = False, as_onnx: bool = False, int8: str = ""
) -> tuple[Finetuned, onnx.Written | None]:
    """Write config, weights, tokenizer and card of a fine-tuned model, and its ONNX files where they are asked for.

    `int8` is a labelled file: the model is also written in 8 bits, and what that loses on the file is in the card. Raises
    ValueError naming what cannot be exported; nothing is written then.
    """
    found = huggingface.load(source)
    if as_onnx or int8:
        onnx.require()
    with appearing(output, CONFIG, overwrite) as folder:
        huggingface.write(found, folder)
        written = onnx.write(found, folder, int8) if as_onnx or int8 else None
        (folder / "README.md").write_text(card.render(found, Path(output).resolve().name, written))
    return found, written


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.commands.export"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="RUN", help="run folder, or one checkpoint in it")
    add("--output", required=True, metavar="HF_DIR", help="folder to write; must not exist or be empty")
    add(
        "--tokenizer",
        default="",
        metavar="FILE",
        help="the run's tokenizer, where its dataset is no longer in its place",
    )
    add("--overwrite", action="store_true", help="replace a folder that was exported before")
    add("--onnx", action="store_true", help="of a fine-tuned model: onnx/model.onnx too, checked in onnxruntime")
    add(
        "--int8",
        default="",
        metavar="FILE",
        help="of a fine-tuned model: onnx/model_quantized.onnx too; the card says what it loses on this labelled file",
    )
    args = parser.parse_args(argv)
    if save.is_finetuned(args.model):
        return _finetuned(args)
    for option, given in (("--onnx", args.onnx), ("--int8", args.int8)):
        if given:
            raise ValueError(f"{option}: is for fine-tuned models; {args.model} is none (no {save.DESCRIPTION})")
    found = export(args.model, args.output, args.tokenizer, args.overwrite)
    model = found.config.model
    causal = found.config.data.masking.causal
    architecture = hf_names.to_huggingface_config(model, causal)["architectures"][0]
    log.info(f"{args.output}: {architecture} of step {found.step:,}, {model.vocab_size:,} pieces")
    if causal:
        log.info(
            "the run was trained left to right: its class is a decoder (is_decoder=true), as is AutoModelForCausalLM"
        )
    elif not (model.nsp or model.modern):
        log.info("the run has no next-sentence head, so BertForPreTraining and the pooler would start untrained")
    return OK


def _finetuned(args: argparse.Namespace) -> int:
    if args.tokenizer:
        raise ValueError(f"--tokenizer: is for runs; {args.model} is a fine-tuned model, which has its own")
    found, written = export_finetuned(args.model, args.output, args.overwrite, args.onnx, args.int8)
    described = found.described
    log.info(f"{args.output}: {huggingface.architecture(described)} for {described.task.name}")
    if written is not None:
        log.info(f"onnx/{onnx.WHOLE}: logits within {written.difference:.1e} of the model's")
        for name, whole in written.scores.items():
            other = written.scores_int8[name]
            log.info(f"onnx/{onnx.QUANTISED}: {name} {other:.4f}, in fp32 {whole:.4f} ({other - whole:+.4f})")
    return OK


if __name__ == "__main__":
    sys.exit(code_of(main))

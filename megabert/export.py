"""Export a run, or one of its checkpoints, as a Hugging Face folder that loads without any code of ours.

megabert export --model RUN --output HF_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from megabert import pretrained
from megabert.common.arguments import Parser, called_as
from megabert.common.atomic_io import appearing
from megabert.common.errors import OK, code_of, command
from megabert.common.logs import log
from megabert.pretrained import Pretrained, hf_names, hf_tokenizer, model_card

CONFIG, WEIGHTS = "config.json", "model.safetensors"
COPIES = (
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
)  # of the embedding and of the head's bias, where these are tied


def export(
    run: str | Path,
    output: str | Path,
    tokenizer: str | Path = "",
    overwrite: bool = False,
    average: bool = False,
) -> Pretrained:
    """Write config, weights (or their `average`), tokenizer and model card of a run's newest whole checkpoint (or of that one
    checkpoint).

    Raises ValueError naming what cannot be exported or where `output` cannot be; nothing is written then.
    """
    found = pretrained.load(run, tokenizer, average)
    model = found.config.model
    config = hf_names.to_huggingface_config(model, found.config.data.masking.causal)
    weights = hf_names.to_huggingface(found.weights, model)
    files = hf_tokenizer.files(found.tokenizer, model.max_positions)
    files[CONFIG] = hf_tokenizer.as_json(config)
    name = Path(output).resolve().name
    files["README.md"] = model_card.render(found, name, config["architectures"][0]).encode()
    with appearing(output, CONFIG, overwrite) as folder:
        for file, data in files.items():
            (folder / file).write_bytes(data)
        copies = COPIES if model.tied else ()
        whole = {name: tensor.contiguous() for name, tensor in weights.items() if name not in copies}
        save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)  # the library makes it readable by its owner alone
    return found


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.export"), description=__doc__)
    add = parser.add_argument
    add("--model", old=["--run"], required=True, metavar="RUN", help="run folder, or one checkpoint in it")
    add("--output", required=True, metavar="HF_DIR", help="folder to write; must not exist or be empty")
    add(
        "--tokenizer",
        default="",
        metavar="FILE",
        help="the run's tokenizer, where its dataset is no longer in its place",
    )
    add("--overwrite", action="store_true", help="replace a folder that was exported before")
    add("--average", action="store_true", help="the average of the run's last weights (average.share)")
    args = parser.parse_args(argv)
    found = export(args.model, args.output, args.tokenizer, args.overwrite, args.average)
    model = found.config.model
    causal = found.config.data.masking.causal
    architecture = hf_names.to_huggingface_config(model, causal)["architectures"][0]
    log.info(f"{args.output}: {architecture} of step {found.step:,}, {model.vocab_size:,} pieces")
    if causal:
        log.info(
            "the run was trained left to right: its class is a decoder (is_decoder=true), as is AutoModelForCausalLM"
        )
    elif not model.nsp:
        log.info(
            "the run has no next-sentence head, so BertForPreTraining and the pooler would start untrained"
        )
    return OK


if __name__ == "__main__":
    sys.exit(code_of(main))

"""A Hugging Face model (folder or hub name) as a run folder to continue pre-training from, optionally with another vocabulary.

megabert convert --model HF_DIR --run DIR
megabert convert --model HF_DIR_OR_RUN --vocab DATA --run DIR
megabert prep build --tokenizer DIR/vocab.txt …
megabert train --config DIR/config.toml --data DATA --run NEW_RUN
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from megabert.common.arguments import Parser, refuse_missing
from megabert.common.errors import command
from megabert.common.files import refuse_existing
from megabert.common.logs import log
from megabert.common.run_files import CONFIG
from megabert.hf.hub import WEIGHT_FILES, is_model_folder, model_folder, refuse_finetuned

# the configuration in the run folder that continues from it
TOML = "config.toml"

if TYPE_CHECKING:
    from megabert.config import Config
    from megabert.hf import Pretrained


def convert(
    source: str | Path,
    run: str | Path,
    tokenizer: str | Path = "",
    nsp: bool = True,
    vocab: str | Path = "",
    drop: bool = False,
) -> Pretrained:
    """Write `run`: a checkpoint of step 0, a config.toml that starts from it, and the tokenizer's file.

    Arguments and errors as of `read.read`, after which nothing is written. Pooler and next-sentence head are kept where the model has
    the second, unless `nsp` is false. `vocab`: dataset, file or folder of a tokenizer that replaces the model's, which may be a run then.
    """
    run = Path(run)
    refuse_existing(run, CONFIG)  # before a model of the hub is downloaded
    folder = model_folder(source)
    refuse_finetuned(folder, source)
    if not vocab and not is_model_folder(folder):
        raise ValueError(
            f"{source}: holds no {' and no '.join(WEIGHT_FILES)}, so it is not a Hugging Face folder; a run needs --vocab"
        )
    from megabert.data.shards import MANIFEST, Dataset
    from megabert.hf import mapping, read, vocabulary

    if not vocab or is_model_folder(folder):
        foreign = read.read(folder, tokenizer, (read.NSP_HEAD,) if nsp else (), drop)
    elif not nsp:
        raise ValueError(f"--no-nsp: {source} is a run, whose heads stay as they are; leave --no-nsp out")
    elif drop:
        raise ValueError(f"--drop-embeddings: {source} is a run, which has none after its tokenizer's; leave it out")
    else:
        foreign = read.load(folder, tokenizer)
    if vocab:
        named = read.named_tokenizer(vocab)
        sources, similar = vocabulary.find_sources(foreign.tokenizer, named), None
        if Path(vocab, MANIFEST).is_file():
            similar = vocabulary.similar_tokens(foreign.tokenizer, named, Dataset(vocab))
        foreign = vocabulary.with_vocabulary(foreign, named, sources, similar)
        alike = {*similar.tokens.tolist()} if similar else set[int]()
        those = f"{len(alike):,} have the mean of similar ones in {vocab}, " if similar else ""
        kinds = Counter(min(len(ids), 2) for i, ids in enumerate(sources) if i not in alike)
        log.info(
            f"of {len(sources):,} tokens {those}{kinds[1]:,} have the vectors of one token of {source}, {kinds[2]:,} the mean of "
            f"several, and {kinds[0]:,}, which its vocabulary cannot express, are drawn"
        )
    elif foreign.config.model.first_position:  # RoBERTa's follows the padding's id, or no export would be possible
        causal = foreign.config.data.masking.causal
        mapping.to_huggingface_config(foreign.config.model, causal, foreign.tokenizer.special_ids)
    read.write_run(foreign, run, {TOML: toml(foreign.config, run.resolve()).encode()})
    return foreign


# for continued training on other text: Gururangan et al. 2020, "Don't Stop Pretraining", appendix B: linear, 6% warm-up, steps as
# for domain-adaptive training, rate and batch as for task-adaptive training, which suit one machine
CONTINUED = """
[optimizer]
lr = 1e-4
beta2 = 0.98

[schedule]
total_steps = 12_500
warmup_steps = 750

[batch]
global_size = 256

[checkpoint]
minutes = 10.0
"""


def toml(config: Config, run: Path) -> str:
    """A configuration that continues from `run` with the settings of CONTINUED; others are defaults or given on the command line."""
    lines = [f"init_from = {json.dumps(str(run), ensure_ascii=False)}", CONTINUED, "[model]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in config.model.model_dump().items()]
    if config.data.masking.causal:
        lines += ["", "[data.masking]", 'strategy = "causal"']
    return "\n".join(lines) + "\n"


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    source = "folder with config.json and model.safetensors or pytorch_model.bin, or OWNER/NAME on the hub"
    add("--model", required=True, metavar="HF_DIR", help=source)
    add("--run", required=True, metavar="DIR", help="run folder to write; must be new or empty")
    add("--tokenizer", default="", metavar="FILE", help="file of a tokenizer, if the folder has none")
    add("--no-nsp", action="store_true", help="leave out pooler and next-sentence head")
    surplus = "leave out all embeddings after the tokenizer's last token, also 128 and more"
    add("--drop-embeddings", action="store_true", help=surplus)
    new = "replace the vocabulary by this tokenizer's: its file, or the folder of a dataset or a model; --model may be a run then"
    add("--vocab", default="", metavar="PATH", help=new)
    args = parser.parse_args(argv)
    refuse_missing(args, "tokenizer", "vocab")
    foreign = convert(args.model, args.run, args.tokenizer, not args.no_nsp, args.vocab, args.drop_embeddings)
    if foreign.initialised:
        log.info(f"not in {args.model}, so initialised as in a new model: {', '.join(foreign.initialised)}")
    if foreign.ignored:
        log.info(f"left out, as pre-training has no place for them: {foreign.left_out}")
    if foreign.config.data.masking.causal:
        log.info("it is a decoder, so pre-training continues causally (data.masking.strategy=causal)")
    model, names = foreign.config.model, (foreign.tokenizer.file_name, TOML)
    tokenizer, config = (shlex.quote(str(Path(args.run, name))) for name in names)
    head = "with" if model.nsp else "without"
    shape = f"{model.layers} layers of {model.hidden}, {model.vocab_size:,} tokens, {head} next-sentence head"
    log.info(f"{args.run}: {shape}. To continue:")
    log.info(f"  megabert prep build --tokenizer {tokenizer}{' --nsp' * model.nsp} --input PATH… --output DATA")
    log.info(f"  megabert train --config {config} --data DATA --run NEW_RUN")
    log.info(
        "which is 12,500 updates of 256 rows at a rate of 1e-4 (schedule.total_steps=…, optimizer.lr=… for others); with "
        "data.mix='{\"GENERAL\" = 0.25}', a dataset of general text, less is forgotten (docs/continue.md)"
    )

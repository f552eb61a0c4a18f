"""A run, one of its checkpoints, or a fine-tuned model as a Hugging Face folder that loads without this package.

megabert export --model RUN --output HF_DIR
megabert export --model RUN --output HF_DIR --sentence-transformers mean
megabert export --model FINETUNED/seed1/best --output HF_DIR
megabert export --model RUN --output HF_DIR --onnx              also onnx/model.onnx, or of a fine-tuned model
megabert export --model RUN --push OWNER/NAME --revisions       to the hub, each kept checkpoint as a revision step-N
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabert.common.arguments import MODEL, TOKENIZER, Parser, refuse_missing
from megabert.common.environment import require_packages
from megabert.common.errors import OK, command, interrupted
from megabert.common.files import atomic_folder, files_below, refuse_existing, write_tensors
from megabert.common.hub_upload import MAIN, Repository
from megabert.common.logs import log
from megabert.common.run_files import checkpoint_name, checkpoints_folder, saved_steps
from megabert.common.storage import is_url
from megabert.hf.hub import model_folder

if TYPE_CHECKING:
    from megabert.hf import Pretrained

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# a file of every export, and of no run or fine-tuned model, which --overwrite would remove
MARK = "special_tokens_map.json"
# files of a repository that an export may write, and so replaces or removes
EXPORTED = re.compile(
    r"onnx/.*|1_Pooling/.*|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json|vocab\.(txt|json)|"
    r"tokenizer(_config)?\.(json|model)|(special_tokens_map|added_tokens)\.json|merges\.txt"
)
# most tokens of a text with which a run's ONNX is checked
PROBED = 512


def export(run: str | Path, output: str | Path, tokenizer: str | Path = "", **options: Any) -> Pretrained:
    """`write` of a run's newest complete checkpoint, or of one checkpoint, with `options`; returns it."""
    from megabert import hf

    pretrained = hf.load(run, tokenizer)
    write(pretrained, output, **options)
    return pretrained


def write(
    pretrained: Pretrained,
    output: str | Path,
    overwrite: bool | None = None,
    pool: str = "",
    name: str = "",
    onnx: bool = False,
) -> None:
    """Write config, weights, tokenizer and model card, which calls the model `name` (default: as the folder). `pool`: "mean" or "cls"
    adds the files of sentence-transformers, for pooled vectors of length 1; `onnx` the masked-language model as ONNX. Raises ValueError
    naming what cannot be exported or a wrong `output`, without writing anything."""
    from megabert.hf import mapping, model_card, sentence_folder, tokenizer_folder
    from megabert.hf.read import MLM_HEAD

    model, causal = pretrained.config.model, pretrained.config.data.masking.causal
    family = mapping.find_family(model)
    if onnx and causal:
        raise ValueError("--onnx: the run is causal, and ONNX is written of masked-language models")
    if onnx:
        pretrained.refuse_without_mlm_head()
    elif not pool and MLM_HEAD in pretrained.initialised:
        log.warning(f"{pretrained.run_dir}: has no {MLM_HEAD}; the one in the export is new, and predicts at random")
    config = mapping.to_huggingface_config(model, causal, pretrained.tokenizer.special_ids)
    card = model_card.render(pretrained, name or Path(output).resolve().name, config["architectures"][0])
    weights = mapping.to_huggingface(pretrained.weights, model)
    separators = mapping.pair_separators(model)
    files = tokenizer_folder.files(pretrained.tokenizer, model.max_positions, model.segmented, separators)
    files |= {CONFIG: tokenizer_folder.as_json(config), "README.md": card.encode()}
    if pool:
        files |= sentence_folder.files(pretrained.config, pool)
    with atomic_folder(output, MARK, overwrite) as folder:
        for file, data in files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
        # of the embedding and of the head's bias
        copies = (family.decoder, family.bias_copy) if model.tied else ()
        whole = {name: tensor.contiguous() for name, tensor in weights.items() if name not in copies}
        write_tensors(folder / WEIGHTS, whole, {"format": "pt"})
        if onnx:
            from megabert.hf.onnx import write as write_onnx

            write_onnx(folder, "ForMaskedLM", model, min(model.max_positions, PROBED))


def export_finetuned(args: argparse.Namespace, source: Path, output: Path, name: str) -> str:
    """Write config, weights, tokenizer and card of a fine-tuned model, and on request ONNX files; returns what it is. Raises ValueError
    naming what cannot be exported, without writing anything."""
    from megabert.finetune import huggingface

    finetuned = huggingface.load(source)
    described = finetuned.described
    with atomic_folder(output, MARK, args.overwrite) as folder:
        huggingface.write(finetuned, folder)
        (folder / "README.md").write_bytes(huggingface.card(finetuned, name or output.resolve().name).encode())
        if args.onnx:
            outputs = ("start_logits", "end_logits") if described.task.kind == "span" else ("logits",)
            from megabert.hf.onnx import write as write_onnx

            class_of = huggingface.HUB_KINDS[described.task.kind].class_of
            write_onnx(folder, class_of, described.config.model, described.max_length, outputs)
    what = f"{huggingface.architecture(described)} for {described.task.name}"
    log.info(f"{args.push or output}: {what}")
    if described.threshold != 0.5:
        above = f"{described.labels[1]} is predicted above {described.threshold:.6g}, in the export above a half"
        log.info(f"--threshold f1: {above}: the bias of its output is changed by as much")
    return what


def export_run(args: argparse.Namespace, source: Path, output: Path, name: str) -> str:
    """`export` of a run or a checkpoint; returns its step and the code that trained it."""
    from megabert.hf import mapping

    pool = args.sentence_transformers
    options = {"overwrite": args.overwrite, "pool": pool, "name": name, "onnx": args.onnx}
    pretrained = export(source, output, args.tokenizer, **options)
    model, causal = pretrained.config.model, pretrained.config.data.masking.causal
    architecture = mapping.to_huggingface_config(model, causal)["architectures"][0]
    kind = f"a SentenceTransformer of {pool} vectors" if pool else architecture
    log.info(f"{args.push or output}: {kind} of step {pretrained.step:,}, {model.vocab_size:,} tokens")
    if causal:
        log.info("the run is causal: its class is a decoder (is_decoder=true), as is AutoModelForCausalLM")
    elif mapping.find_family(model).nsp and not (model.nsp or pool):
        log.info("the run has no next-sentence head, so BertForPreTraining and the pooler would start untrained")
    revision = pretrained.state.get("revision", "unknown")
    return f"Step {pretrained.step:,}" + (f", MegaBERT {revision}" if revision != "unknown" else "")


def push(args: argparse.Namespace, write_folder: Callable[[argparse.Namespace, Path, Path, str], str]) -> None:
    """Export to the hub, one folder at a time on the disk: the model, or each kept checkpoint of a run as a branch and the newest as
    `main` too. The folder --output, if any, is written last, so that the same command completes a push that was killed."""
    sources = [Path(args.model)]
    if args.revisions:
        kept = checkpoints_folder(args.model)
        sources = [kept / checkpoint_name(step) for step in saved_steps(kept.parent)]
    repository = Repository(args.push, args.private)
    for source in sources:
        newest = source == sources[-1]
        if not newest and not source.exists():
            continue  # the run is training, and has removed it since
        branches = [f"step-{int(source.name.removeprefix('step-'))}"] if args.revisions else []
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            message = write_folder(args, source, folder, args.push)
            files = files_below(folder)
            for branch in branches + [MAIN] * newest:
                # of an earlier push with other options, beside which these files would be another model
                there = repository.listing() if branch == MAIN else ()
                old = [path for path in there if EXPORTED.fullmatch(path) and path not in files]
                changed = repository.push(files, message, branch, removed=old)
                log.info(f"{args.push}, revision {branch}: {'pushed' if changed else 'has the same files already'}")
            if newest and args.output:
                with atomic_folder(args.output, MARK, args.overwrite) as output:
                    shutil.copytree(folder, output, dirs_exist_ok=True)


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other."""
    if not args.output and not args.push:
        raise ValueError("name a folder with --output, a repository of the hub with --push, or both")
    for option in ("private", "revisions"):
        if getattr(args, option) and not args.push:
            raise ValueError(f"--{option}: is for --push OWNER/NAME")
    if args.onnx and args.sentence_transformers:
        raise ValueError('--onnx: sentence-transformers makes its own: SentenceTransformer(HF_DIR, backend="onnx")')
    if args.revisions and is_url(args.model):
        newest = "only the newest checkpoint of a URL is copied"
        raise ValueError(f"--revisions: {newest}; name a run folder, not {args.model}")


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=f"{MODEL}; or a fine-tuned model's folder or name")
    add("--output", default="", metavar="HF_DIR", help="folder to write; must be new or empty")
    hub = "repository of the Hugging Face hub to upload to, with the token of `hf auth login`, or HF_TOKEN; made if missing"
    add("--push", default="", metavar="OWNER/NAME", help=hub)
    add("--private", action="store_true", help="of --push: only its owner sees the repository")
    each = (
        "of --push: also each kept checkpoint of the run, as the revision step-N; what is there already is not repeated"
    )
    add("--revisions", action="store_true", help=each)
    add("--tokenizer", default="", metavar="FILE", help=TOKENIZER)
    add("--overwrite", action="store_true", help="replace an exported folder")
    pools = "a folder for sentence-transformers: vectors of texts, the mean of all tokens' or that of [CLS]"
    add("--sentence-transformers", default="", choices=("mean", "cls"), help=pools)
    onnx = "also onnx/model.onnx, of a run its masked-language model; checked in onnxruntime"
    add("--onnx", action="store_true", help=onnx)
    args = parser.parse_args(argv)
    check_options(args)
    refuse_missing(args, "tokenizer")
    if args.output:
        refuse_existing(Path(args.output), MARK, args.overwrite)
    if args.onnx:
        require_packages("--onnx", "onnx", "onnx", "onnxruntime", "onnxscript", "transformers")
    args.model = str(model_folder(args.model))
    from megabert.finetune import tasks

    finetuned = bool(tasks.find(args.model))
    for option in ("tokenizer", "sentence_transformers", "revisions") if finetuned else ():
        if getattr(args, option):
            raise ValueError(f"--{option.replace('_', '-')}: is for runs; {args.model} is a fine-tuned model")
    write_folder = export_finetuned if finetuned else export_run
    if not args.push:
        write_folder(args, Path(args.model), Path(args.output), "")
        return OK
    try:
        push(args, write_folder)
        return OK
    except KeyboardInterrupt:
        return interrupted("the same command completes the push")

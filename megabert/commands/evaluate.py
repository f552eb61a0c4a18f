"""Held-out MLM loss (next-token loss of a causal run) and NSP loss of a model under a fixed mask.

megabert evaluate --model MODEL --data DIR           prints one JSON line
megabert evaluate --model MODEL --data DIR DIR …     the first one's metrics, and loss and bits a byte of each
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megabert.common import storage
from megabert.common.arguments import MODEL, Parser
from megabert.common.errors import command
from megabert.hf.hub import model_folder


def evaluate_run(run: str | Path, data: str | Sequence[str], rows: int = 0) -> dict[str, float | int]:
    """Metrics of the newest complete checkpoint of a run, or of another model that `hf.load` reads, on the available device, with its
    default backends, in the run's precision (fp32 on a CPU that would emulate it). For several datasets those of the
    first, and loss and bits a byte of each."""
    import numpy as np
    import torch
    from tqdm import tqdm

    from megabert import evaluation, hf
    from megabert.config import replace
    from megabert.data.masking import MaskingVocabulary, held_out_masking
    from megabert.data.mixture import distinct_names
    from megabert.engine import precision
    from megabert.hf.unknown_tokens import UnknownTokens

    folders = [data] if isinstance(data, str) else list(data)
    datasets, folder = [evaluation.held_out(each) for each in folders], hf.model_folder(run)
    loaded = hf.load(folder, "" if hf.is_model_folder(folder) else datasets[0].tokenizer_path.resolve())
    cfg, longest = loaded.config, loaded.config.model.max_positions
    for name, dataset in zip(folders, datasets, strict=True):
        if not loaded.tokenizer.is_of(dataset.manifest.tokenizer["sha256"]):
            raise ValueError(
                f"{name}: its tokenizer is not that of {run}; build it with --tokenizer {shlex.quote(str(loaded.tokenizer.path))}"
            )
        if dataset.manifest.seq_len > longest:
            raise ValueError(
                f"{name}: has rows of {dataset.manifest.seq_len} tokens, and {run} takes at most {longest}"
            )
    if rows:
        cfg = replace(cfg, "eval.rows", rows)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = loaded.language_model(device, precision.dtype_on(device, cfg.precision))
    metrics: dict[str, float | int] = {"step": loaded.step}
    vocabulary = MaskingVocabulary.of(loaded.tokenizer)  # compared above, by more than its SHA-256
    for name, dataset in zip(distinct_names(list(map(storage.public, folders))), datasets, strict=True):
        batches = evaluation.with_sources(evaluation.fixed_batches(dataset, vocabulary, cfg), dataset)
        total = -(-min(dataset.rows, cfg.eval.rows) // cfg.batch.micro_size)
        batches = tqdm(batches, "evaluate", total, unit=" batches", disable=None, leave=False)
        ids = dataset.read(np.arange(min(dataset.rows, cfg.eval.rows))).ids
        UnknownTokens(loaded.tokenizer).add([ids[ids != 0]]).warn(name)
        sums = evaluation.batch_sums(model, batches, device, len(dataset.source_names))
        of_this = evaluation.summary(sums, dataset.source_names)
        if not sums.isfinite().all():
            raise ValueError(f"{name}: the loss of {run} is not finite; name another model")
        if dataset is datasets[0]:
            metrics |= of_this
        if len(folders) > 1:
            size = evaluation.bytes_per_token(dataset, loaded.tokenizer, held_out_masking(cfg).causal)
            metrics |= evaluation.dataset_metrics(name, of_this, size)
    return metrics


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=MODEL)
    folders = "dataset folders written by data_prep, with held-out splits"
    add("--data", required=True, nargs="+", metavar="DIR", help=folders)
    add("--rows", type=int, default=0, help="most held-out rows; 0: the run's eval.rows")
    args = parser.parse_args(argv)
    if args.rows < 0:
        raise ValueError(f"--rows {args.rows}: must be 0 or more")
    with contextlib.redirect_stdout(sys.stderr):  # stdout has the JSON alone
        from megabert.data.shards import Manifest

        for data in args.data:
            Manifest.load(data)  # wrong values are refused before a download and the slow imports
        folder = model_folder(args.model)
        metrics = evaluate_run(folder, args.data, args.rows)
    print(json.dumps(metrics))

"""Held-out evaluation under a mask that never changes, so that any two evaluations can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megabert import checkpoint
from megabert import config as configuration
from megabert.common.remote import below
from megabert.config import Config
from megabert.data.batch import Batch
from megabert.data.loader import eval_batches
from megabert.data.objective import evaluated
from megabert.data.shards import Dataset, Manifest
from megabert.data.tokenizer import Tokenizer
from megabert.engine import precision
from megabert.engine.result import loss_table
from megabert.model import BertForPreTraining

EVAL_SEED = 20181011  # fixed: the mask of a held-out row is the same in every run


def held_out(data: str, config: Config) -> Dataset:
    """The held-out split of a dataset folder, damaged rows left out where `data.on_damage` says so. Raises ValueError
    when it has none."""
    part = Manifest.load(data).held_out
    if part is None:
        raise ValueError(f"{data}: no held-out split; build it with data_prep build --held-out SHARE")
    return Dataset(below(data, part["path"]), config.data.on_damage == "skip")


def fixed_batches(
    dataset: Dataset, tokenizer: Tokenizer, config: Config, rank: int = 0, world: int = 1, rows: int = 0
) -> Iterable[Batch]:
    """This rank's share of the first `eval.rows` held-out rows, or of the first `rows` of those, each once, under the fixed
    mask."""
    return eval_batches(
        dataset,
        tokenizer,
        micro_batch=config.batch.micro_size,
        seed=EVAL_SEED,
        masking=evaluated(config),
        rank=rank,
        world=world,
        max_rows=min(rows or config.eval.rows, config.eval.rows),
    )


@torch.no_grad()
def batch_sums(model: BertForPreTraining, batches: Iterable[Batch], device: torch.device) -> torch.Tensor:
    """Sums over `batches`, fp64 [6]: MLM loss, correct, predictions; NSP loss, correct, pairs. Leaves train/eval as it was."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    for batch in batches:
        sums += loss_table(model(**batch.to(device).inputs()), model.counts(batch)).flatten()
    model.train(was_training)
    return sums


def summary(sums: torch.Tensor) -> dict[str, float]:
    """`eval/…` figures from the sums of all ranks, MLM's and NSP's first. Raises ValueError when nothing was predicted."""
    mlm_loss, mlm_correct, predictions, nsp_loss, nsp_correct, pairs = sums[:6].tolist()
    if not predictions:
        raise ValueError("the held-out split has no token to predict")
    loss = mlm_loss / predictions
    values = {
        "eval/mlm_loss": loss,
        "eval/mlm_accuracy": mlm_correct / predictions,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/predictions": predictions,
    }
    if pairs:
        values |= {"eval/nsp_loss": nsp_loss / pairs, "eval/nsp_accuracy": nsp_correct / pairs, "eval/pairs": pairs}
    return values


def evaluate_run(run: str, data: str, rows: int = 0) -> dict[str, float | int]:
    """Figures of the newest whole checkpoint of a run, on the device at hand, with its usual backends, in the run's precision
    (fp8: bf16; fp32 on a CPU that would emulate it)."""
    weights, state = checkpoint.load_weights(run)
    tree = state["config"]
    if rows:
        tree = tree | {"eval": tree["eval"] | {"rows": rows}}
    cfg = configuration.from_saved(tree)
    dataset = held_out(data, cfg)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    if tokenizer.sha256 != state["tokenizer"]:
        raise ValueError(f"{data}: its tokenizer is not the one {run} was trained with")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = precision.dtype_on(device, cfg.precision)
    model = BertForPreTraining(cfg.model, None, device.type, dtype, cfg.causal_updates)
    model.load_state_dict(weights)
    sums = batch_sums(model.to(device, dtype), fixed_batches(dataset, tokenizer, cfg), device)
    return {"step": state["step"]} | summary(sums)

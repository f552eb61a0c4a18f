"""Hugging Face's `BertForMaskedLM` or `ModernBertForMaskedLM` pre-trained in a plain loop: the peer of the race.

Text, tokenizer and size are ours. The rest is as usual with transformers: one sequence a row, shuffled, padded to the longest of
the batch by `DataCollatorForLanguageModeling`, sdpa attention, autocast to the device's fastest precision, torch's fused AdamW (no
decay of biases and LayerNorm, as in the Trainer), clipped gradients, and a learning rate with linear warm-up and linear decay to
zero over the budget of time or tokens. Time is that of the loop, including data. As a process it writes the points of its curve to a
folder, with weights under our names.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as WordTable
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.common import hardware
from benchmarks.peers.hf_step import peer_config
from benchmarks.race.recipes import collect_overrides
from benchmarks.race.training import WEIGHTS
from megabert import config as configuration
from megabert.config import ModelConfig
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.engine.precision import DTYPES, usual
from megabert.hf.mapping import from_huggingface

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4 in all our tokenizers
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class PeerRecipe:
    """Settings of the loop. The budget is `tokens` if that is above 0, else `minutes`."""

    minutes: float
    batch: int
    tokens: int = 0  # real tokens, without padding
    lr: float = 5e-4
    dropout: float = 0.1
    warmup: float = 0.06  # share of the budget
    masking: float = 0.15  # share of predicted tokens
    weight_decay: float = 0.01
    clip: float = 1.0
    beta1: float = 0.9
    # the Trainer's defaults
    beta2: float = 0.999
    eps: float = 1e-8
    seed: int = 42


class Sequences(torch.utils.data.Dataset):
    """All sequences of a dataset, unpacked, as inputs of the collator: ids [n] and special_tokens_mask [n]."""

    def __init__(self, dataset: Dataset) -> None:
        rows = dataset.read(np.arange(dataset.rows))
        lengths = rows.bounds[:, :, 0].astype(np.int64)  # [n, S]
        starts = np.arange(len(lengths))[:, None] * rows.ids.shape[1] + np.cumsum(lengths, 1) - lengths
        self.ids, self.starts, self.lengths = rows.ids.reshape(-1), starts[lengths > 0], lengths[lengths > 0]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        start = self.starts[index]
        ids = self.ids[start : start + self.lengths[index]]
        special = (ids < len(SPECIALS)) & (ids != 1)  # an unknown token is text
        return {"input_ids": ids.tolist(), "special_tokens_mask": special.astype(int).tolist()}


def collator(vocab_size: int, masking: float = 0.15) -> DataCollatorForLanguageModeling:
    """Hugging Face's collator for our ids; it needs only a tokenizer's size and special ids."""
    table = {name: i for i, name in enumerate(SPECIALS)}
    table |= {f"<{i}>": i for i in range(len(SPECIALS), vocab_size)}
    roles = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=WordTable(WordLevel(table, unk_token="[UNK]")), **roles)
    assert len(fast) == vocab_size
    return DataCollatorForLanguageModeling(fast, mlm=True, mlm_probability=masking)


def model_of(size: ModelConfig, dropout: float) -> PreTrainedModel:
    """Hugging Face's class of this size, newly initialised; ModernBERT computes logits only at masked positions, as its authors'."""
    size = size.model_copy(update={"dropout": dropout, "attention_dropout": dropout})
    sparse = {"sparse_prediction": True} if size.modern else {}
    return AutoModelForMaskedLM.from_config(peer_config(size, **sparse))


def optimizer_of(model: torch.nn.Module, recipe: PeerRecipe) -> torch.optim.AdamW:
    """The Trainer's groups: weight decay for matrices, none for vectors (biases and LayerNorm)."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=betas, eps=recipe.eps, fused=True)


def budget_used(recipe: PeerRecipe, seconds: float, tokens: int) -> float:
    """Used share of the budget, at most 1."""
    return min(tokens / recipe.tokens if recipe.tokens else seconds / (60 * recipe.minutes), 1.0)


def rate(recipe: PeerRecipe, used: float) -> float:
    """Learning rate at a share of the budget: linear warm-up over `warmup` of it, then linear decay to zero."""
    up = used / recipe.warmup if recipe.warmup else 1.0
    return recipe.lr * min(up, (1 - used) / (1 - recipe.warmup))


def train(
    dataset: Path, tokenizer: Tokenizer, size: ModelConfig, recipe: PeerRecipe, every: float
) -> Iterator[tuple[dict[str, float], PreTrainedModel]]:
    """Train for the budget on the CPU or the first GPU.

    Yields (seconds of training, step, real tokens so far; the model) before the first step, after every share `every` of the
    budget, and at the end. The caller's time is not counted.
    """
    torch.manual_seed(recipe.seed)
    where, dtype = DEVICE, DTYPES[usual(DEVICE)]
    model = model_of(size, recipe.dropout)
    torch.nn.Module.to(model, where)
    optimizer = optimizer_of(model, recipe)
    draw, collate = torch.Generator().manual_seed(recipe.seed), collator(tokenizer.vocab_size, recipe.masking)
    how: dict[str, Any] = {"batch_size": recipe.batch, "shuffle": True, "drop_last": True, "generator": draw}
    how["pin_memory"] = where.type == "cuda"  # as the Trainer
    # endless batches, in a new order each epoch
    stream = chain.from_iterable(repeat(DataLoader(Sequences(Dataset(dataset)), collate_fn=collate, **how)))
    seconds, due, step, tokens = 0.0, 0.0, 0, 0
    while True:
        used = budget_used(recipe, seconds, tokens)
        if used >= min(due, 1):
            yield {"seconds": round(seconds, 2), "step": step, "tokens": tokens}, model
            due += every
        if used >= 1:
            return
        model.train()
        started = time.perf_counter()
        batch = next(stream)
        real = int(batch["attention_mask"].sum())
        batch = {name: value.to(where, non_blocking=True) for name, value in batch.items()}
        for group in optimizer.param_groups:
            group["lr"] = max(rate(recipe, used), recipe.lr * 1e-3)  # the rate of the first step is above 0
        with torch.autocast(where.type, dtype, enabled=dtype != torch.float32):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        if where.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - started
        step += 1
        tokens += real


def recipe_of(fields: dict[str, Any]) -> tuple[PeerRecipe, list[str]]:
    """The loop's recipe, and `model.` keys as overrides of the preset. Raises ValueError for a field of neither."""
    sizes = {name: value for name, value in fields.items() if name.startswith("model.")}
    rest = {name: value for name, value in fields.items() if name not in sizes}
    try:
        recipe = PeerRecipe(**rest)
    except TypeError as error:
        raise ValueError(f"recipe of the peer: {error}") from None
    return recipe, collect_overrides(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", required=True, type=Path)
    add("--run", required=True, type=Path, help="folder to write, replaced if it exists")
    add("--preset", required=True, help="our preset with the model's size, which model. keys of the recipe change")
    add("--recipe", required=True, type=json.loads, help="JSON of the loop's PeerRecipe, and model. keys")
    add("--points", required=True, type=int, help="points of the curve")
    args = parser.parse_args()
    recipe, sizes = recipe_of(args.recipe)
    tokenizer = Tokenizer.load(Dataset(args.data).tokenizer_path)
    norm = "pre" if "model.kind=modern" in sizes else "post"
    fixed = [f"model.vocab_size={tokenizer.vocab_size}", "model.nsp=false", f"model.norm={norm}"]
    cfg = configuration.load(args.preset, [*sizes, *fixed])
    shutil.rmtree(args.run, ignore_errors=True)
    args.run.mkdir(parents=True)
    points = []
    for point, model in train(args.data, tokenizer, cfg.model, recipe, 1 / args.points):
        theirs = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
        weights = from_huggingface(theirs, cfg.model)
        if not all(torch.isfinite(value).all() for value in weights.values()):
            raise ValueError(f"weights that are not finite at step {point['step']}")
        folder = args.run / f"step-{point['step']:08d}"
        folder.mkdir()
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS)
        points.append(point)
    finished = {"config": cfg.model_dump() | {"precision": usual(DEVICE)}, "points": points}
    (args.run / "finished.json").write_text(json.dumps(finished))


if __name__ == "__main__":
    hardware.run(main)

"""A whole training loop on the project's parts: shards, loader, model and torch's AdamW; one process, no DeepSpeed.

python examples/train_loop.py data/seq128 [UPDATES]

It shows where things are. What it leaves out is what megabert/train.py is for: ranks, checkpoints, resuming, evaluation.
"""

from __future__ import annotations

import sys

import torch

from megabert.config import ModelConfig, ScheduleConfig
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.model import BertForPreTraining
from megabert.optim.schedule import learning_rate


def main(folder: str, updates: int = 100) -> float:
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = Dataset(folder)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    pairs = bool(dataset.manifest.options.get("nsp", True))
    shape = ModelConfig(layers=2, hidden=128, heads=2, vocab_size=tokenizer.vocab_size, nsp=pairs)
    model = BertForPreTraining(shape, device=device, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = ScheduleConfig(total_steps=updates, warmup_steps=updates // 10)
    loader = Loader(dataset, tokenizer, global_batch=64, micro_batch=32, seed=42)
    loss = float("nan")
    for step, update in zip(range(updates), loader, strict=False):
        optimizer.param_groups[0]["lr"] = learning_rate(schedule, 2e-3, step, 0.0)
        total = torch.zeros((), device=device)
        for batch in update.batches:  # micro-batches: their gradients add up to the update's
            output = model(**batch.to(device).inputs())  # sums, divided by the counts of the whole update
            part = output.mlm_loss_sum / max(1, update.predictions)
            part = part + output.nsp_loss_sum / max(1, update.nsp_pairs)
            part.backward()
            total += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == updates - 1:
            loss = float(total)
            print(f"update {step:4}  loss {loss:.4f}", flush=True)
    return loss


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

"""python examples/train_loop.py data/seq128 [UPDATES]: the project's shards, loader and model under torch's AdamW.

One process, no checkpoints: for these use megabert/train.py.
"""

from __future__ import annotations

import sys

import torch

from megabert.config import ModelConfig
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.model import BertForPreTraining


def main(folder: str, updates: int = 100) -> float:
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = Dataset(folder)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    length, pairs = dataset.manifest.seq_len, bool(dataset.manifest.options.get("nsp", True))
    shape = ModelConfig(layers=2, hidden=128, heads=2, max_positions=length, vocab_size=tokenizer.vocab_size, nsp=pairs)
    model = BertForPreTraining(shape, device=device, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=updates, pct_start=0.11)
    loader = Loader(dataset, tokenizer, global_batch=64, micro_batch=32, seed=42)
    loss = torch.zeros(())
    for step, update in zip(range(updates), loader, strict=False):
        loss = torch.zeros((), device=device)
        # sums over predictions and pairs by the whole update's counts: gradients add up
        for batch in update.batches:
            output = model(**batch.to(device).inputs())
            share = output.mlm_loss_sum / max(1, update.predictions) + output.nsp_loss_sum / max(1, update.nsp_pairs)
            share.backward()
            loss += share.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == updates - 1:
            print(f"update {step:4}  loss {float(loss):.4f}", flush=True)
    return float(loss)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

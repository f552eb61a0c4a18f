"""Hugging Face's `BertForPreTraining` in a plain loop: the peer of `bench_step.py`.

The same sequences as ours, one a row and padded, sdpa attention, autocast, torch's fused AdamW, gradients clipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megabert.config import Config, ModelConfig
from megabert.data.loader import Update
from megabert.engine.precision import DTYPES
from megabert.metrics import training_flops


def bert_config(size: ModelConfig) -> Any:
    """`BertConfig` of this size and dropout, with sdpa attention."""
    from transformers import BertConfig

    fields: dict[str, Any] = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.ffn,
        "max_position_embeddings": size.max_positions,
        "hidden_dropout_prob": size.dropout,
        "attention_probs_dropout_prob": size.attention_dropout,
        "attn_implementation": "sdpa",
    }
    return BertConfig(**fields)


class HuggingFaceStep:
    """`BertForPreTraining` in a plain loop."""

    def __init__(self, cfg: Config, device: torch.device) -> None:
        from transformers import BertForPreTraining as Peer

        torch.manual_seed(cfg.seed)
        module: torch.nn.Module = Peer(bert_config(cfg.model))
        self.module = module.to(device).train()
        o = cfg.optimizer
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=o.lr, eps=o.eps, weight_decay=o.weight_decay, fused=True
        )
        self.device, self.clip, self.model = device, o.clip, cfg.model
        self.autocast = torch.autocast(device.type, DTYPES[cfg.precision], enabled=cfg.precision != "fp32")

    def step(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The loss, on the device."""
        losses = []
        for batch in batches:
            with self.autocast:
                loss = self.module(**{name: t.to(self.device) for name, t in batch.items()}).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    def executed_flops(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """FLOPs of all positions, including pads, in the encoder, full attention and the vocabulary product."""
        rows, width = sum(len(b["input_ids"]) for b in batches), batches[0]["input_ids"].shape[1]
        return training_flops(self.model, rows * width, rows * width**2, rows * width, rows)


def padded(update: Update, width: int) -> list[dict[str, torch.Tensor]]:
    """The sequences of an update, one padded sequence a row, in as many micro-batches, with the same masks and labels."""
    rows = []
    for b in update.batches:
        labels = torch.full((b.input_ids.numel(),), -100)
        used = b.mlm_labels >= 0
        labels[b.mlm_positions[used].long()] = b.mlm_labels[used]
        labels = labels.view_as(b.input_ids)
        for r, s in (b.lengths > 0).nonzero().tolist():
            start = int(b.lengths[r, :s].sum())
            span = slice(start, start + int(b.lengths[r, s]))
            rows.append((b.input_ids[r, span], b.segment_ids[r, span], labels[r, span], b.nsp_labels[r, s]))
    batches = []
    for part in np.array_split(np.arange(len(rows)), len(update.batches)):
        ids, kinds = (torch.zeros(len(part), width, dtype=torch.long) for _ in range(2))
        labels = torch.full((len(part), width), -100)
        mask = torch.zeros(len(part), width, dtype=torch.long)
        for i, (a, k, t, _) in enumerate(rows[j] for j in part):
            ids[i, : len(a)], kinds[i, : len(a)], labels[i, : len(a)], mask[i, : len(a)] = a, k, t, 1
        nsp = torch.stack([rows[j][3] for j in part])
        batch = {"input_ids": ids, "token_type_ids": kinds, "attention_mask": mask, "labels": labels}
        batches.append(batch | {"next_sentence_label": nsp})
    return batches

"""Hugging Face's `BertForPreTraining` in a plain loop: the peer of `bench_step.py`.

The same sequences as ours, one a row and padded, sdpa attention, autocast, torch's fused AdamW, gradients clipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, BertForPreTraining, PretrainedConfig

from megabert.config import Config, ModelConfig
from megabert.data.loader import Update
from megabert.engine.precision import DTYPES
from megabert.hf.mapping import to_huggingface_config


def peer_config(size: ModelConfig, **more: Any) -> PretrainedConfig:
    """Hugging Face's configuration of a model of this size and dropout, with sdpa attention."""
    return AutoConfig.for_model(**to_huggingface_config(size), **more, attn_implementation="sdpa")


class HuggingFaceStep:
    """`BertForPreTraining` in a plain loop."""

    def __init__(self, cfg: Config, device: torch.device) -> None:
        torch.manual_seed(cfg.seed)
        module: torch.nn.Module = BertForPreTraining(peer_config(cfg.model))
        self.module = module.to(device).train()
        o = cfg.optimizer
        settings: Any = {"lr": o.lr, "eps": o.eps, "weight_decay": o.weight_decay}
        self.optimizer = torch.optim.AdamW(self.module.parameters(), **settings, fused=True)
        self.device, self.clip = device, o.clip
        self.autocast = torch.autocast(device.type, DTYPES[cfg.precision], enabled=cfg.precision != "fp32")

    def step(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The loss, on the device."""
        losses = []
        for batch in batches:
            with self.autocast:
                inputs = {name: t.to(self.device, non_blocking=True) for name, t in batch.items()}
                loss = self.module(**inputs).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()


def padded(update: Update, width: int) -> list[dict[str, torch.Tensor]]:
    """The sequences of an update, one padded a row, in as many micro-batches, with its masks and labels; pinned where the update is."""
    rows: list[dict[str, torch.Tensor]] = []
    for b in update.batches:
        labels, used = torch.full((b.input_ids.numel(),), -100), b.mlm_labels >= 0
        labels[b.mlm_positions[used].long()] = b.mlm_labels[used]
        whole = {"input_ids": b.input_ids.long(), "token_type_ids": b.segment_ids.long()}
        whole |= {"attention_mask": torch.ones_like(whole["input_ids"]), "labels": labels.view_as(b.input_ids)}
        for r, s in (b.lengths > 0).nonzero().tolist():
            start, length = int(b.lengths[r, :s].sum()), int(b.lengths[r, s])
            row = {
                name: F.pad(t[r, start : start + length], (0, width - length), value=-100 if name == "labels" else 0)
                for name, t in whole.items()
            }
            rows.append(row | {"next_sentence_label": b.nsp_labels[r, s]})
    parts = np.array_split(np.arange(len(rows)), len(update.batches))
    pinned = update.batches[0].input_ids.is_pinned()
    made = [{name: torch.stack([rows[j][name] for j in part]) for name in rows[0]} for part in parts]
    return [{name: t.pin_memory() for name, t in batch.items()} for batch in made] if pinned else made

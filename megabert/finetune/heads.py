"""Heads: one added layer on the pre-trained encoder for each task.

A text is read at [CLS], through the pre-trained pooler if the model has one; words and answers at their tokens (Devlin et al. 2019,
section 4); in a modern model all of them through the masked-LM head's transform (Warner et al. 2024). Both are of the last layer:
others are read without. Losses are sums, as `megabert.engine` requires. The added layer is computed in fp32: bf16 has too few
digits for a score or to distinguish spans.

Shapes: N items, P read positions, W of them in the longest item, D' features (of one layer hidden), K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabert.config import Config, ModelConfig, OpsConfig
from megabert.hf.inference import read_layers, vector_width
from megabert.model import BertForPreTraining, Linear

# Kinds read at tokens; the others at [CLS].
TOKEN_KINDS = ("tag", "span")
PRETRAINING_HEADS = ("mlm", "nsp", "pooler")


class OutputLayer(Linear):
    """The added layer, computed in fp32 for parameters of any type."""

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., K)
        return F.linear(x.float(), self.weight.float(), self.bias.float() if self.bias is not None else None)


class Head(nn.Module):
    """Pooler with tanh (for texts), transform (in modern models) or neither -> dropout -> the added layer."""

    def __init__(self, cfg: ModelConfig, kind: str, outputs: int, transform: nn.Module, layers: str) -> None:
        super().__init__()
        pooled = not cfg.modern and kind not in TOKEN_KINDS and layers == "last"
        self.transform = transform if cfg.modern and layers == "last" else None
        self.pooler = Linear(cfg.hidden, cfg.hidden, cfg.init_std) if pooled else None
        # The published span head has no dropout.
        self.dropout = nn.Dropout(0.0 if kind == "span" and not cfg.modern else cfg.dropout)
        # as ModernBERT's classes draw it (Warner et al. 2024); from BERT's 0.02 a narrow model learns rare tags many updates later
        self.output = OutputLayer(vector_width(layers, cfg), outputs, cfg.hidden**-0.5)

    def forward(self, hidden: Tensor) -> Tensor:  # (P, D') -> (P, K)
        if self.transform is not None:
            hidden = self.transform(hidden)
        if self.pooler is not None:
            hidden = torch.tanh(self.pooler(hidden))
        return self.output(self.dropout(hidden))


class Finetuner(nn.Module):
    """Encoder and head; `forward` trains, `logits` predicts."""

    def __init__(
        self, encoder: BertForPreTraining, kind: str, outputs: int, layers: str = "last", new: Sequence[str] = ()
    ) -> None:
        """`outputs`: classes, labels or tags, 1 for a score, 2 for a span. `layers` as of `read_layers`. The pre-training heads of
        `encoder` are removed; the pooler, or a modern model's transform, moves into the head. `new`: names of the encoder's parameters
        without weights of pre-training."""
        super().__init__()
        self.kind, self.outputs, self.terms, self.weights, self.layers = kind, outputs, (kind,), (1.0,), layers
        pooler = getattr(encoder, "pooler", None)
        self.head = Head(encoder.cfg, kind, outputs, encoder.mlm, layers)
        # pre-training heads that `freeze` leaves to train
        self.untrained = {name.partition(".")[0] for name in new} | ({"pooler"} if pooler is None else set())
        self.encoder = encoder
        for name in PRETRAINING_HEADS:
            if hasattr(encoder, name):
                delattr(encoder, name)
        for name in ("bias", "decoder"):
            encoder.embeddings.word.register_parameter(name, None)
        if pooler is not None and self.head.pooler is not None:
            self.head.pooler.load_state_dict(pooler.state_dict())

    def freeze(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Make the parts with weights of pre-training constant, in eval mode, and no part of the parameters of this module; returns
        their weights, as named and typed before. What is left to train is the added layer, and a pooler or transform without such."""
        weights = self.state_dict()
        parts = ((self, "encoder", "encoder"), (self.head, "transform", "mlm"), (self.head, "pooler", "pooler"))
        for owner, name, original in parts:
            if original not in self.untrained and (part := owner._modules.pop(name, None)) is not None:
                # Not `setattr`, which would register it.
                owner.__dict__[name] = part.to(device, dtype).eval().requires_grad_(False)
        left = self.state_dict()
        return {name: tensor for name, tensor in weights.items() if name not in left}

    def logits(self, read: Tensor, **inputs: Tensor) -> Tensor:
        """fp32 [P, K] at the positions `read` (int [P]) of packed `inputs`; for texts one position an item: [N, K]."""
        return self.head(read_layers(self.encoder, self.layers, read, **inputs))

    def forward(
        self, targets: Tensor, read: Tensor, sizes: Sequence[int] | None = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and number of correct answers (0 for scores), over items, for tags over the words or tokens that are read, for
        several labels over all labels of all items. `sizes` of spans: how many of the P belong to each item."""
        logits = self.logits(read, **inputs)
        if self.kind == "score":
            loss = F.mse_loss(logits[:, 0], targets.float(), reduction="sum")
            return loss, loss.new_zeros(())
        if self.kind == "span":
            assert sizes is not None
            spans = by_item(logits, sizes)  # (N, W, 2)
            loss = F.cross_entropy(spans, targets, reduction="sum") / 2
            return loss, (spans.argmax(1) == targets).all(1).sum() if len(spans) else loss.new_zeros(())
        if self.kind == "multilabel":
            wanted = targets.view_as(logits)  # (N, K)
            loss = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
            return loss, ((logits > 0) == (wanted > 0)).sum()
        return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(-1) == targets).sum()

    def counts(self, batch: Any) -> tuple[int, ...]:
        """Number of answers over which the loss of `batch` is summed."""
        return (len(batch.targets),)


def by_item(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """[P, K] -> [N, W, K], -inf after an item's last position."""
    if not sizes:
        return logits.view(0, 1, logits.shape[-1])
    return nn.utils.rnn.pad_sequence(logits.split(list(sizes)), batch_first=True, padding_value=-torch.inf)


def build(
    config: Config,
    kind: str,
    outputs: int,
    weights: Mapping[str, Tensor] | None,
    device: torch.device,
    dtype: torch.dtype,
    layers: str = "last",
) -> Finetuner:
    """The module to train, in fp32 on the CPU, with backends for `dtype` on `device`, independent of `config.ops`.

    `weights`: those of a pre-trained model by name, except for pre-training heads that it lacks; None, and these: random, by torch's
    generator. `config.model` is that of the model, except for dropout.
    """
    model = BertForPreTraining(config.model, OpsConfig(), device.type, dtype, config.data.masking.causal)
    new: list[str] = []
    if weights is not None:
        new, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and all(name.startswith(PRETRAINING_HEADS) for name in new), (new, unexpected)
    return Finetuner(model, kind, outputs, layers, new)

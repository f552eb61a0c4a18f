"""Heads: one added layer a task on the pre-trained encoder.

A text is read at [CLS], through the pre-trained pooler where the model has one; words and answers at their own tokens (Devlin et
al. 2019, section 4 and appendix A.5); of a modern model all of them through the masked-LM head's transform. Losses are sums, as
`megabert.engine` takes them. The added layer is computed in fp32: bf16 has too few digits for a score or for telling spans apart.
A frozen encoder is not part of the module's state: it is neither trained, nor saved with the moments, nor ever in training mode.

Shapes: N items, P positions that are read, W of them in the longest item, D hidden, K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabert.config import Config, OpsConfig
from megabert.model import BertForPreTraining, Linear, MlmTransform

# Kinds that are read at their tokens; the others at [CLS].
TOKEN_KINDS = ("tag", "span")
PRETRAINING_HEADS = ("mlm", "nsp", "pooler")
# The last layers, concatenated: the best of Devlin et al. 2019, table 7.
FEATURE_LAYERS = 4
# Devlin et al. 2019, section 5.3.
LSTM_LAYERS = 2


@dataclass(frozen=True)
class HeadShape:
    """What is added to an encoder. `outputs`: classes, tags, 1 for a score or a choice, 2 for a span."""

    kind: str
    outputs: int
    head: str = "linear"
    # Of the BiLSTM, both directions together.
    width: int = 768
    frozen: bool = False
    # Of the labels in the loss; (): all 1.
    class_weights: tuple[float, ...] = ()

    def check(self, layers: int) -> None:
        """Raises ValueError naming the option that does not go with the others, or with a model of so many layers."""
        if self.head == "bilstm" and (self.kind != "tag" or not self.frozen):
            raise ValueError("--head bilstm tags words by fixed features: use it with --freeze and a tagging task")
        if self.head == "bilstm" and layers < FEATURE_LAYERS:
            raise ValueError(f"--head bilstm reads the last {FEATURE_LAYERS} layers, the model has {layers}")
        if self.width < 2 or self.width % 2:
            raise ValueError(f"--width {self.width}: give an even number, half of it for each direction")


class OutputLayer(Linear):
    """The added layer, in fp32 whatever its parameters are in."""

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., K)
        return F.linear(x.float(), self.weight.float(), self.bias.float())


class TextHead(nn.Module):
    """[CLS] -> dense + tanh -> dropout -> the added layer."""

    def __init__(self, hidden: int, outputs: int, std: float, dropout: float) -> None:
        super().__init__()
        self.pooler = Linear(hidden, hidden, std)
        self.dropout = nn.Dropout(dropout)
        self.output = OutputLayer(hidden, outputs, std)

    def forward(self, hidden: Tensor, places: Tensor | None) -> Tensor:  # (N, D) -> (N, K)
        return self.output(self.dropout(torch.tanh(self.pooler(hidden))))


class TransformHead(nn.Module):
    """The masked-LM head's transform, pre-trained -> dropout -> the added layer: of modern models, for texts and for tokens
    (Warner et al. 2024)."""

    def __init__(self, transform: MlmTransform, hidden: int, outputs: int, std: float, dropout: float) -> None:
        super().__init__()
        self.transform = transform
        self.dropout = nn.Dropout(dropout)
        self.output = OutputLayer(hidden, outputs, std)

    def forward(self, hidden: Tensor, places: Tensor | None) -> Tensor:  # (P, D) -> (P, K)
        return self.output(self.dropout(self.transform(hidden)))


class TokenHead(nn.Module):
    """Dropout -> the added layer, token by token."""

    def __init__(self, hidden: int, outputs: int, std: float, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = OutputLayer(hidden, outputs, std)

    def forward(self, hidden: Tensor, places: Tensor | None) -> Tensor:  # (P, D) -> (P, K)
        return self.output(self.dropout(hidden))


class BiLstmHead(nn.Module):
    """A two-layer BiLSTM over the words of each item -> the added layer (Devlin et al. 2019, section 5.3)."""

    def __init__(self, hidden: int, outputs: int, std: float, dropout: float, width: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(hidden, width // 2, LSTM_LAYERS, batch_first=True, bidirectional=True, dropout=dropout)
        self.output = OutputLayer(width, outputs, std)

    def forward(self, hidden: Tensor, places: Tensor | None) -> Tensor:  # (P, D) -> (P, K)
        assert places is not None
        if not len(places):
            # An LSTM takes no empty batch, and its parameters need gradients all the same.
            return self.output(hidden.new_zeros(0, self.output.weight.shape[1])) + 0 * sum(
                parameter.sum() for parameter in self.lstm.parameters()
            )
        words = self.dropout(hidden)[places.clamp(min=0)]  # (N, W, D)
        lengths = (places >= 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)  # (N, W, width)
        return self.output(self.dropout(out[places >= 0]))


def without_heads(encoder: BertForPreTraining) -> BertForPreTraining:
    """The same encoder, its pre-training heads removed."""
    for name in PRETRAINING_HEADS:
        if hasattr(encoder, name):
            delattr(encoder, name)
    for name in ("bias", "decoder"):
        encoder.embeddings.word.register_parameter(name, None)
    return encoder


class Finetuner(nn.Module):
    """Encoder and head; `forward` trains, `logits` predicts."""

    def __init__(self, encoder: BertForPreTraining, shape: HeadShape) -> None:
        """`encoder` loses its pre-training heads; the pooler becomes the text head's, the transform a modern model's."""
        super().__init__()
        cfg = encoder.cfg
        self.shape, self.terms, self.weights = shape, (shape.kind,), (1.0,)
        pooler, transform = getattr(encoder, "pooler", None), encoder.mlm
        without_heads(encoder)
        size = cfg.hidden * (FEATURE_LAYERS if shape.head == "bilstm" else 1)
        self.head: TextHead | TransformHead | TokenHead | BiLstmHead
        if shape.head == "bilstm":
            self.head = BiLstmHead(size, shape.outputs, cfg.init_std, cfg.dropout, shape.width)
        elif cfg.modern:
            self.head = TransformHead(transform, size, shape.outputs, cfg.init_std, cfg.dropout)
        elif shape.kind not in TOKEN_KINDS:
            self.head = TextHead(size, shape.outputs, cfg.init_std, cfg.dropout)
            if pooler is not None:
                self.head.pooler.load_state_dict(pooler.state_dict())
        else:
            dropout = cfg.dropout if shape.kind == "tag" else 0.0  # the published span head has none
            self.head = TokenHead(size, shape.outputs, cfg.init_std, dropout)
        # fp32 [labels], on the device of the loss
        self._class_weights: Tensor | None = None
        # A tuple hides it from parameters() and train().
        self.fixed: tuple[BertForPreTraining, ...] = (encoder,) if shape.frozen else ()
        if shape.frozen:
            encoder.eval().requires_grad_(False)
        else:
            self.encoder = encoder

    def logits(self, read: Tensor, places: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """fp32 [P, K] of the positions `read` (int [P]) of packed `inputs`; one position an item for texts: [N, K].

        `places` int64 [N, W] says which of the P belong to one item, for the BiLSTM.
        """
        if not self.fixed:
            return self.head(self.encoder.encode(**inputs, keep=read), places)
        (encoder,) = self.fixed
        with torch.no_grad():
            if self.shape.head == "linear":
                hidden = encoder.encode(**inputs, keep=read)
            else:
                layers = encoder.hidden_states(**inputs, count=None)[-FEATURE_LAYERS:]
                hidden = torch.cat([layer.flatten(0, 1)[read] for layer in layers], -1)  # (P, 4D)
        return self.head(hidden.to(self.head.output.weight.dtype), places)

    def forward(
        self, targets: Tensor, read: Tensor, places: Tensor | None = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and number of correct answers (of scores: 0), over items, for tags over words, for several labels over each
        label of each item."""
        logits = self.logits(read, places, **inputs)
        kind, weight = self.shape.kind, self.label_weights(logits.device)
        if kind == "score":
            loss = F.mse_loss(logits[:, 0], targets.float(), reduction="sum")
            return loss, loss.new_zeros(())
        if kind == "span":
            assert places is not None
            spans = by_item(logits, places)  # (N, W, 2)
            loss = F.cross_entropy(spans, targets, reduction="sum") / 2
            return loss, (spans.argmax(1) == targets).all(1).sum() if len(spans) else loss.new_zeros(())
        if kind == "multilabel":
            wanted = targets.view_as(logits)  # (N, K)
            loss = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum", pos_weight=weight)
            return loss, ((logits > 0) == (wanted > 0)).sum()
        if kind == "choose":
            assert places is not None
            logits = by_item(logits, places)[..., 0]  # (N, W)
        return F.cross_entropy(logits, targets, weight, reduction="sum"), (logits.argmax(-1) == targets).sum()

    def label_weights(self, device: torch.device) -> Tensor | None:
        """fp32 [labels], of each label in the loss, put on `device` once; None: all 1."""
        if self.shape.class_weights and self._class_weights is None:
            self._class_weights = torch.tensor(self.shape.class_weights, device=device)
        return self._class_weights

    def counts(self, batch: Any) -> tuple[int, ...]:
        """Over how many answers the loss of `batch` is summed."""
        return (len(batch.targets),)


def by_item(logits: Tensor, places: Tensor) -> Tensor:
    """[P, K] -> [N, W, K], -inf after an item's last position."""
    if not len(places):
        return logits.view(0, 1, logits.shape[-1])
    return logits[places.clamp(min=0)].masked_fill((places < 0)[..., None], -torch.inf)


def build(
    config: Config, shape: HeadShape, weights: Mapping[str, Tensor] | None, device: torch.device, dtype: torch.dtype
) -> Finetuner:
    """The module to train in fp32, its frozen encoder (if it is) in `dtype` on `device`.

    `weights` are a pre-trained model's by name, None: all random, as torch's generator says. `config.model` is the
    model's, but for its dropout; backends are those of `device`, whatever `config.ops` names.
    """
    model = BertForPreTraining(config.model, OpsConfig(), device.type, dtype, config.data.masking.causal)
    if weights is not None:
        model.load_state_dict(weights)
    if shape.frozen:
        head = Finetuner(model, shape)
        model.to(device, dtype)
        return head
    return Finetuner(model, shape)


def frozen_weights(module: Finetuner, start: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The fixed encoder's weights as a saved model names them: those it started with, in fp32, or its random ones."""
    weights = module.fixed[0].state_dict()
    return {f"encoder.{name}": (start[name] if start is not None else w.float()) for name, w in weights.items()}


def load(module: Finetuner, weights: Mapping[str, Tensor]) -> None:
    """Set a module's weights, a frozen encoder's too, from those of a saved model."""
    encoder, head = (
        {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        for prefix in ("encoder.", "head.")
    )
    (module.fixed[0] if module.fixed else module.encoder).load_state_dict(encoder)
    module.head.load_state_dict(head)

"""BERT for pre-training: masked language modelling and next-sentence prediction over rows of packed sequences.

A sequence's output does not depend on what it is packed with. Losses are sums in fp32, never means: the caller knows
the counts of the whole update. The decoder is tied to the word embedding by being the same module, unless it has
weights of its own. Dropout is a function of a seed tensor (or of torch's generator, in torch backends), so recomputation
replays it. Post- and pre-LN have the same parameters: the norms sit on the residual stream (published) or on the branches.

Shapes: B rows, T tokens a row, D hidden, H heads, F feed-forward, V vocabulary, S sequences a row, K predictions a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megabert.common.labels import IGNORE
from megabert.config import ModelConfig, OpsConfig
from megabert.model import ops as native
from megabert.model.layers import (
    Affine,
    Embeddings,
    Layer,
    Linear,
    MlmTransform,
)


class Output(NamedTuple):
    """Loss sums, then as many counts of right answers, in the order of `BertForPreTraining.terms`."""

    mlm_loss_sum: Tensor  # fp32, over predictions
    nsp_loss_sum: Tensor  # fp32, over pairs with a label
    mlm_correct: Tensor  # int64
    nsp_correct: Tensor  # int64


class BertForPreTraining(nn.Module):
    """`forward` trains, `encode` gives hidden states; `backends` says what each operation runs on and why.

    device ("cpu", "cuda") and dtype say where and in which compute type the model will run, `causal` that tokens of one
    sequence will have different key ranges; they decide what `auto` means. Raises ValueError for a model without vocabulary
    size or for a backend that cannot run there.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        ops: OpsConfig | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        causal: bool = False,
    ):
        super().__init__()
        if not cfg.vocab_size:
            raise ValueError("model.vocab_size=0: set it to the tokenizer's number of entries")
        ops = ops or OpsConfig()
        self.cfg = cfg
        self.terms: tuple[str, ...] = ("mlm", "nsp" if cfg.nsp else "")  # names of its losses
        self.weights: tuple[float, ...] = (1.0, 1.0)
        self.backends = native.Backends(
            *(
                native.choose(op, getattr(ops, op), device, dtype, causal, cfg.hidden // cfg.heads)
                for op in native.BACKENDS
            )
        )
        self.embeddings = Embeddings(cfg, self.backends)
        self.layers = nn.ModuleList(Layer(cfg, self.backends) for _ in range(cfg.layers))
        self.mlm = MlmTransform(cfg, self.backends.layer.name)
        if cfg.nsp:
            self.pooler = Linear(cfg.hidden, cfg.hidden, cfg.init_std)
            self.nsp = Linear(cfg.hidden, 2, cfg.init_std)

    @torch.no_grad()
    def start_from_frequencies(self, counts: Tensor) -> None:
        """Let the decoder predict, before it has learned anything, each id as often as it occurs: `counts` int64 [V], to which
        one is added. To be called on new weights that no engine has taken over."""
        shares = (counts.double() + 1) / (counts.sum() + len(counts))
        self.embeddings.word.bias[: self.cfg.vocab_size] = shares.log().float()

    def use_fp8(self, device: torch.device, gradient_unit: int) -> native.Scaling:
        """Train the four linears of each layer but the first and the last in FP8; their scales (arguments as there).

        Raises ValueError on a device that cannot.
        """
        linears = [m for layer in self.layers[1:-1] for m in layer.modules() if isinstance(m, Affine)]
        scaling = native.Scaling(len(linears), device, gradient_unit)
        for module, scales in zip(linears, scaling.linears, strict=True):
            module.fp8 = scales
        if scaling.backend != "native":  # then GELU and norms do not round for the products either
            return scaling
        layers: list[Any] = list(self.layers)
        for layer, above in zip_longest(layers, layers[1:]):
            layer.attention_output.following = layer.feed_forward.fp8
            if not self.cfg.modern:
                layer.feed_forward.following = layer.feed_forward_output.fp8
            if above is not None and not self.cfg.activation_checkpointing:  # which keeps what layers read
                layer.feed_forward_output.following = above.qkv.fp8
        return scaling

    def encode(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, key_start: Tensor, key_end: Tensor,
        lengths: Tensor, keep: Tensor | None = None, seed: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states [B, T, D] of int32 [B, T] inputs (lengths [B, S]); a token attends to [key_start, key_end).

        With `keep` (int flat positions [N] or [B, J]) the last layer computes only those: [N, D] or [B, J, D], the same
        values. seed int64 [1] decides the dropout masks of native backends; without it, it is drawn from torch's generator.
        With a second element, the place of the batch's first row in the update, a row's masks do not depend on its batch.
        """
        inputs = (input_ids, segment_ids, position_ids, key_start, key_end, lengths)
        for normed, _stream in self._run(*inputs, keep, seed):
            last = normed
        return last

    def hidden_states(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, key_start: Tensor, key_end: Tensor,
        lengths: Tensor, seed: Tensor | None = None, count: int | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """L + 1 tensors [B, T, D]: what the first layer reads, then what each layer gives; the last is `encode`'s.

        With `count` the first so many, and no layer behind them is computed.

        Those of transformers' `output_hidden_states`: post-LN the norms; pre-LN the residual stream, which only behind
        the last layer is normalised. Arguments as in `encode`.
        """
        inputs = (input_ids, segment_ids, position_ids, key_start, key_end, lengths)
        states = enumerate(islice(self._run(*inputs, None, seed), count))
        return [normed if index == len(self.layers) else stream for index, (normed, stream) in states]

    def _run(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, key_start: Tensor, key_end: Tensor,
        lengths: Tensor, keep: Tensor | None, seed: Tensor | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
        """(normed, stream) of the embeddings and of each layer, as they are computed."""
        if seed is None:
            seed = torch.randint(2**62, (1,), device=input_ids.device)
        bounds = native.attention_inputs(self.backends.attention.name, key_start, key_end, lengths)
        normed, x = self.embeddings(input_ids, segment_ids, position_ids, seed)
        yield normed, x
        angles = None
        if self.cfg.modern:
            angles = native.rotation(position_ids, self.cfg.hidden // self.cfg.heads)
        for index, layer in enumerate(self.layers):
            last = keep if index == len(self.layers) - 1 else None
            if last is not None and not self.training:
                bounds = native.only_queries(self.backends.attention.name, bounds, last)
            args = (normed, x, bounds, seed, 4 * index + 4, last, angles)
            if self.cfg.activation_checkpointing and self.training:
                normed, x = checkpoint(layer, *args, use_reentrant=False)
            else:
                normed, x = layer(*args)
            yield normed, x

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, key_start: Tensor, key_end: Tensor,
        lengths: Tensor, cls_positions: Tensor, nsp_labels: Tensor, mlm_positions: Tensor, mlm_labels: Tensor,
        seed: Tensor | None = None, logits_at: Tensor | None = None,
    ) -> Output | Tensor:  # fmt: skip
        """Loss sums and correct counts of a packed batch (shapes as in `encode`); with `logits_at`, int flat positions [N],
        only the logits there over the real vocabulary [N, V].

        cls_positions int32 [B, S], nsp_labels int64 [B, S], mlm_positions int32 [B, K], mlm_labels int64 [B, K]:
        flat positions into B * T and labels, -100 where there is nothing to predict.
        """
        if logits_at is not None:
            inputs = (input_ids, segment_ids, position_ids, key_start, key_end, lengths)
            return self.mlm_logits(self.encode(*inputs, logits_at, seed))
        slots = mlm_positions.shape[1]
        keep = torch.cat([mlm_positions, cls_positions], 1) if self.cfg.nsp else mlm_positions  # (B, K + S)
        hidden = self.encode(input_ids, segment_ids, position_ids, key_start, key_end, lengths, keep, seed)
        mlm_loss, mlm_correct = self.embeddings.word(
            hidden=self.mlm(hidden[:, :slots].flatten(0, 1)), labels=mlm_labels.flatten()
        )
        if not self.cfg.nsp:
            return Output(mlm_loss, mlm_loss.new_zeros(()), mlm_correct, torch.zeros_like(mlm_correct))
        logits = self.nsp_logits(hidden[:, slots:].flatten(0, 1)).float()  # (B * S, 2)
        labels = nsp_labels.flatten()
        nsp_loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        return Output(mlm_loss, nsp_loss, mlm_correct, (logits.argmax(-1) == labels).sum())

    def counts(self, batch: Any) -> tuple[int, ...]:
        """Over how many items each loss of `batch` is summed."""
        return batch.predictions, batch.nsp_pairs if self.cfg.nsp else 0

    def mlm_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] -> logits over the real vocabulary [N, V]."""
        return self.embeddings.word(hidden=self.mlm(hidden))

    def nsp_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of [CLS] [N, D] -> logits [N, 2], class 0 = the second part really follows."""
        return self.nsp(torch.tanh(self.pooler(hidden)))


def outline(cfg: ModelConfig) -> BertForPreTraining:
    """The model on the `meta` device: names and shapes of its parameters, without their memory."""
    with torch.device("meta"):
        return BertForPreTraining(cfg, OpsConfig(attention="sdpa", mlm_loss="torch", layer="torch"))


def parameter_count(cfg: ModelConfig) -> int:
    """Parameters of the model, padded vocabulary entries left out."""
    total = sum(p.numel() for p in outline(cfg).parameters())
    return total - (cfg.padded_vocab - cfg.vocab_size) * (cfg.hidden * (1 if cfg.tied else 2) + 1)

"""BERT for pre-training: masked language modelling and next-sentence prediction over rows of packed sequences.

A sequence's output does not depend on what it is packed with. Losses are sums in fp32, never means: the caller knows
the counts of the whole update. The decoder is tied to the word embedding by being the same module, unless it has
weights of its own. Dropout is a function of a seed tensor (or of torch's generator, in torch backends), so recomputation
replays it. Post- and pre-LN have the same parameters: the norms sit on the residual stream (published) or on the branches.

Shapes: B rows, T tokens a row, D hidden, H heads, F feed-forward, V vocabulary, S sequences a row, K predictions a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megabert import ops as native
from megabert.common.labels import IGNORE
from megabert.config import ModelConfig, OpsConfig


class Affine(nn.Module):
    """The parameters of y = x W^T + b: weight [out, in], truncated-normal start (Devlin et al. 2019)."""

    matrices = 0  # that `weight` is, one below the other, for an optimizer of whole matrices; 0: not of a layer

    def __init__(self, inputs: int, outputs: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(_truncated_normal((outputs, inputs), std))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.packed: Tensor | None = None  # the weight as inference on the CPU reads it

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # (..., in) -> (..., out)
        if self.packed is not None:
            return native.packed_linear(x, self.packed, bias)
        return F.linear(x, self.weight, bias)


class Linear(Affine):
    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return self.matmul(x, self.bias)


class QueriesKeysValues(Affine):
    """The projection in front of attention: queries, keys, values, each head by head.

    Returns them and, for native attention, the bias, whose gradient is attention's to give: with that of its product, it
    would be a sum that reads all of theirs again.
    """

    def __init__(self, cfg: ModelConfig, attention: str):
        super().__init__(cfg.hidden, 3 * cfg.hidden, cfg.init_std)
        self.native = attention == "native" and not cfg.modern  # rotation is of what has its bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # (..., D) -> (..., 3D), (3D)
        if not self.native:
            return self.matmul(x, self.bias), None
        return self.matmul(x, self.bias.detach()), self.bias.view_as(self.bias)


class LinearGelu(Affine):
    """gelu(x W^T + b), the exact (erf) one."""

    def __init__(self, inputs: int, outputs: int, cfg: ModelConfig, backend: str):
        super().__init__(inputs, outputs, cfg.init_std)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        if self.packed is not None:
            return native.packed_linear(x, self.packed, self.bias, gelu=True)
        return native.bias_gelu(self.matmul(x), self.bias, self.backend)


class GatedLinear(Affine):
    """gelu(a) * b of (a, b) = x W^T + b, W [2F, D]: a feed-forward layer with a gate."""

    matrices = 2

    def __init__(self, cfg: ModelConfig, backend: str):
        super().__init__(cfg.hidden, cfg.ffn_inputs, cfg.init_std)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., F)
        return native.bias_geglu(self.matmul(x), self.bias, self.backend)


class LinearNorm(Affine):
    """A branch's way back: projection, dropout, residual addition and LayerNorm.

    Returns (normed, stream): what the next branch reads, and the next residual. Post-LN: both are the norm.
    """

    def __init__(self, inputs: int, cfg: ModelConfig, backend: str):
        super().__init__(inputs, cfg.hidden, cfg.init_std)
        self.norm_weight = nn.Parameter(torch.ones(cfg.hidden))
        self.norm_bias = nn.Parameter(torch.zeros(cfg.hidden))
        self.cfg, self.backend = cfg, backend
        if cfg.zero_init:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor, residual: Tensor, seed: Tensor, stream: int) -> tuple[Tensor, Tensor]:
        p, eps, post = (self.cfg.dropout if self.training else 0.0, self.cfg.layer_norm_eps, self.cfg.norm == "post")
        inputs = self.matmul(x), self.bias, residual, self.norm_weight, self.norm_bias, p, eps, seed, stream
        return native.dropout_add_layer_norm(*inputs, self.backend, post)


class Vocabulary(nn.Module):
    """The word embedding and its other end, the decoder: one weight [V', D], or two, V' >= V a multiple of 128.

    Entries from V on start at zero, are never looked up, predicted or summed, and get zero gradients.
    """

    decoder: nn.Parameter | None

    def __init__(self, cfg: ModelConfig, backend: str):
        super().__init__()
        self.size, self.backend = cfg.vocab_size, backend
        self.weight = nn.Parameter(self._table(cfg))
        self.bias = nn.Parameter(torch.zeros(cfg.padded_vocab))  # of the decoder
        self.register_parameter("decoder", None if cfg.tied else nn.Parameter(self._table(cfg)))

    @staticmethod
    def _table(cfg: ModelConfig) -> Tensor:
        weight = _truncated_normal((cfg.padded_vocab, cfg.hidden), cfg.init_std)
        weight[cfg.vocab_size :] = 0
        return weight

    def forward(self, ids: Tensor | None = None, hidden: Tensor | None = None, labels: Tensor | None = None) -> Any:
        """ids -> embeddings [..., D]; hidden [N, D] and labels [N] -> (loss sum, correct); hidden -> logits [N, V]."""
        if ids is not None:
            return F.embedding(ids, self.weight)
        assert hidden is not None
        weight = self.weight if self.decoder is None else self.decoder
        if labels is None:
            return native.mlm_logits(hidden, weight, self.bias, self.size)
        return native.mlm_loss(hidden, weight, self.bias, labels, self.size, self.backend)


class Embeddings(nn.Module):
    """Words + positions + segments, LayerNorm, dropout. `modern`: words alone, and their norm is the stream, too."""

    def __init__(self, cfg: ModelConfig, backends: native.Backends):
        super().__init__()
        self.word = Vocabulary(cfg, backends.mlm_loss.name)
        if not cfg.modern:
            self.position = nn.Parameter(_truncated_normal((cfg.max_positions, cfg.hidden), cfg.init_std))
            self.segment = nn.Parameter(_truncated_normal((2, cfg.hidden), cfg.init_std))
        self.norm_weight = nn.Parameter(torch.ones(cfg.hidden))
        self.norm_bias = nn.Parameter(torch.zeros(cfg.hidden))
        self.cfg, self.backend = cfg, backends.layer.name

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """int32 [B, T] each -> (normed, stream), both [B, T, D]."""
        x = self.word(input_ids)
        if not self.cfg.modern:
            x = x + F.embedding(position_ids, self.position) + F.embedding(segment_ids, self.segment)
        normed = F.layer_norm(x, (self.cfg.hidden,), self.norm_weight, self.norm_bias, self.cfg.layer_norm_eps)
        p = self.cfg.dropout if self.training else 0.0
        if self.cfg.norm == "post" or self.cfg.modern:
            normed = native.dropout(normed, p, seed, 0, self.backend)
            return normed, normed
        return normed, native.dropout(x, p, seed, 0, self.backend)


class Layer(nn.Module):
    """Self-attention and feed-forward, each with its residual (Vaswani et al. 2017; pre-LN: Xiong et al. 2020)."""

    def __init__(self, cfg: ModelConfig, backends: native.Backends):
        super().__init__()
        layer = backends.layer.name
        self.qkv = QueriesKeysValues(cfg, backends.attention.name)
        self.attention_output = LinearNorm(cfg.hidden, cfg, layer)
        self.feed_forward: GatedLinear | LinearGelu
        if cfg.modern:
            self.feed_forward = GatedLinear(cfg, layer)
        else:
            self.feed_forward = LinearGelu(cfg.hidden, cfg.ffn, cfg, layer)
            self.feed_forward.matrices = 1
        self.feed_forward_output = LinearNorm(cfg.ffn, cfg, layer)
        self.qkv.matrices = 3
        self.attention_output.matrices = self.feed_forward_output.matrices = 1
        self.cfg, self.attention, self.layer = cfg, backends.attention.name, layer

    def forward(
        self,
        normed: Tensor,
        x: Tensor,
        bounds: list[Tensor],
        seed: Tensor,
        stream: int,
        keep: Tensor | None = None,
        angles: native.Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(normed, stream) [B, T, D] -> the same; with `keep`, only those flat positions [N] or [B, J] -> [..., D]."""
        p = self.cfg.attention_dropout if self.training else 0.0
        qkv, bias = self.qkv(normed)  # (B, T, 3D)
        if angles is not None:
            qkv = native.rotate(qkv, self.cfg.heads, angles, self.layer)
        context = native.attend(qkv, self.cfg.heads, bounds, p, seed, stream, self.attention, bias)  # (B, T, D)
        if keep is not None:
            flat = keep.flatten()
            context, x = (t.flatten(0, 1).index_select(0, flat).unflatten(0, keep.shape) for t in (context, x))
        normed, x = self.attention_output(context, x, seed, stream + 1)
        return self.feed_forward_output(self.feed_forward(normed), x, seed, stream + 2)


class MlmTransform(LinearGelu):
    """Dense + GELU + LayerNorm in front of the decoder."""

    def __init__(self, cfg: ModelConfig, backend: str):
        super().__init__(cfg.hidden, cfg.hidden, cfg, backend)
        self.norm_weight = nn.Parameter(torch.ones(cfg.hidden))
        self.norm_bias = nn.Parameter(torch.zeros(cfg.hidden))
        self.eps = cfg.layer_norm_eps

    def forward(self, x: Tensor) -> Tensor:  # (N, D) -> (N, D)
        y = native.bias_gelu(self.matmul(x), self.bias, self.backend)
        return F.layer_norm(y, y.shape[-1:], self.norm_weight, self.norm_bias, self.eps)


def _truncated_normal(shape: tuple[int, ...], std: float) -> Tensor:
    """Normal values cut at two standard deviations, as the published initialisation."""
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std)


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

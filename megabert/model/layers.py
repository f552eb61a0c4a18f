"""The parts of BERT: projections, vocabulary, embeddings, the encoder's layer.

Each parameter is used only in its own module's forward, so that ZeRO-3 can gather it there. Shapes as in `bert`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabert.config import ModelConfig
from megabert.model import ops as native


class Affine(nn.Module):
    """The parameters of y = x W^T + b: weight [out, in], truncated-normal start (Devlin et al. 2019)."""

    matrices = (
        0  # that `weight` is, one below the other, for an optimizer of whole matrices; 0: not of a layer
    )

    def __init__(self, inputs: int, outputs: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(_truncated_normal((outputs, inputs), std))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.fp8: native.Linear8 | None = None  # of training alone; evaluation runs in the compute type
        self.packed: Tensor | None = None  # the weight as inference on the CPU reads it

    def product(
        self, x: Tensor | native.Rounded, bias: Tensor | None = None
    ) -> Tensor:  # (..., in) -> (..., out)
        if self.packed is not None:
            assert isinstance(x, Tensor)
            return native.packed_linear(x, self.packed, bias)
        return native.linear(x, self.weight, bias, self.fp8 if self.training else None)


class Linear(Affine):
    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return self.product(x, self.bias)


class QueriesKeysValues(Affine):
    """The projection in front of attention: queries, keys, values, each head by head.

    Returns them and, for native attention, the bias, whose gradient is attention's to give: with that of its product, it
    would be a sum that reads all of theirs again.
    """

    def __init__(self, cfg: ModelConfig, attention: str):
        super().__init__(cfg.hidden, 3 * cfg.hidden, cfg.init_std)
        self.native = attention == "native" and not cfg.modern  # rotation is of what has its bias

    def forward(
        self, x: Tensor | native.Rounded
    ) -> tuple[Tensor, Tensor | None]:  # (..., D) -> (..., 3D), (3D)
        if not self.native:
            return self.product(x, self.bias), None
        return self.product(x, self.bias.detach()), self.bias.view_as(self.bias)


class LinearGelu(Affine):
    """gelu(x W^T + b), the exact (erf) one.

    `joined`: while training, GELU is left to the product that reads it. That gives b its gradient too, as attention does.
    """

    def __init__(self, inputs: int, outputs: int, cfg: ModelConfig, backend: str, joined: bool = False):
        super().__init__(inputs, outputs, cfg.init_std)
        self.backend, self.joined = backend, joined
        self.following: native.Linear8 | None = None  # of the linear that alone reads the result

    def forward(
        self, x: Tensor | native.Rounded
    ) -> Tensor | native.Rounded | native.BeforeGelu:  # (..., in) -> (..., out)
        if self.joined and self.training and self.fp8 is None:
            return native.BeforeGelu(self.product(x), self.bias.view_as(self.bias))
        if self.packed is not None:
            assert isinstance(x, Tensor)
            return native.packed_linear(x, self.packed, self.bias, gelu=True)
        fp8, following = self.fp8, self.following
        if self.training and self.backend == "native" and following and fp8 and fp8.known:
            return native.linear_gelu(x, self.weight, self.bias, fp8, following)
        return native.bias_gelu(self.product(x), self.bias, self.backend)


class GatedLinear(Affine):
    """gelu(a) * b of (a, b) = x W^T + b, W [2F, D]: a feed-forward layer with a gate."""

    matrices = 2

    def __init__(self, cfg: ModelConfig, backend: str):
        super().__init__(cfg.hidden, cfg.ffn_inputs, cfg.init_std)
        self.backend = backend

    def forward(self, x: Tensor | native.Rounded) -> Tensor:  # (..., D) -> (..., F)
        return native.bias_geglu(self.product(x), self.bias, self.backend)


class LinearNorm(Affine):
    """A branch's way back: projection, dropout, residual addition and LayerNorm.

    Returns (normed, stream): what the next branch reads, and the next residual. Post-LN: both are the norm.
    """

    def __init__(self, inputs: int, cfg: ModelConfig, backend: str):
        super().__init__(inputs, cfg.hidden, cfg.init_std)
        self.norm_weight = nn.Parameter(torch.ones(cfg.hidden))
        self.norm_bias = nn.Parameter(torch.zeros(cfg.hidden))
        self.cfg, self.backend = cfg, backend
        self.following: native.Linear8 | None = None  # of the linear that reads what is normed
        if cfg.zero_init:
            nn.init.zeros_(self.weight)

    def forward(
        self, x: Tensor | native.Rounded | native.BeforeGelu, residual: Tensor, seed: Tensor, stream: int
    ) -> tuple[Tensor | native.Rounded, Tensor]:
        p, eps, post = (
            self.cfg.dropout if self.training else 0.0,
            self.cfg.layer_norm_eps,
            self.cfg.norm == "post",
        )
        if isinstance(x, native.BeforeGelu):
            branch = native.gelu_linear(x, self.weight, self.backend)
        else:
            branch = self.product(x)
        inputs = branch, self.bias, residual, self.norm_weight, self.norm_bias, p, eps, seed, stream
        following = self.following if self.training else None
        if following and native.rounds_norm(following, self.cfg.hidden, self.backend, residual.device.type):
            return native.norm_rounded(*inputs, post, following)
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

    def forward(
        self, ids: Tensor | None = None, hidden: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
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
        normed = F.layer_norm(
            x, (self.cfg.hidden,), self.norm_weight, self.norm_bias, self.cfg.layer_norm_eps
        )
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
        joined = backends.feed_forward.name == "triton"
        self.feed_forward: GatedLinear | LinearGelu
        if cfg.modern:
            self.feed_forward = GatedLinear(cfg, layer)
        else:
            self.feed_forward = LinearGelu(cfg.hidden, cfg.ffn, cfg, layer, joined)
            self.feed_forward.matrices = 1
        self.feed_forward_output = LinearNorm(cfg.ffn, cfg, layer)
        self.qkv.matrices = 3
        self.attention_output.matrices = self.feed_forward_output.matrices = 1
        self.cfg, self.attention, self.layer = cfg, backends.attention.name, layer

    def forward(
        self,
        normed: Tensor | native.Rounded,
        x: Tensor,
        bounds: list[Tensor],
        seed: Tensor,
        stream: int,
        keep: Tensor | None = None,
        angles: native.Rotation | None = None,
    ) -> tuple[Tensor | native.Rounded, Tensor]:
        """(normed, stream) [B, T, D] -> the same; with `keep`, only those flat positions [N] or [B, J] -> [..., D]."""
        p = self.cfg.attention_dropout if self.training else 0.0
        qkv, bias = self.qkv(normed)  # (B, T, 3D)
        if angles is not None:
            qkv = native.rotate(qkv, self.cfg.heads, angles, self.layer)
        context = native.attend(
            qkv, self.cfg.heads, bounds, p, seed, stream, self.attention, bias
        )  # (B, T, D)
        if keep is not None:
            flat = keep.flatten()
            context, x = (
                t.flatten(0, 1).index_select(0, flat).unflatten(0, keep.shape) for t in (context, x)
            )
        normed, x = self.attention_output(context, x, seed, stream + 1)
        return self.feed_forward_output(self.feed_forward(normed), x, seed, stream + 2)


class MlmTransform(LinearGelu):
    """Dense + GELU + LayerNorm in front of the decoder."""

    def __init__(self, cfg: ModelConfig, backend: str):
        super().__init__(cfg.hidden, cfg.hidden, cfg, backend)
        self.norm_weight = nn.Parameter(torch.ones(cfg.hidden))
        self.norm_bias = nn.Parameter(torch.zeros(cfg.hidden))
        self.eps = cfg.layer_norm_eps

    def forward(self, x: Tensor | native.Rounded) -> Tensor:  # (N, D) -> (N, D)
        y = native.bias_gelu(self.product(x), self.bias, self.backend)
        return F.layer_norm(y, y.shape[-1:], self.norm_weight, self.norm_bias, self.eps)


def _truncated_normal(shape: tuple[int, ...], std: float) -> Tensor:
    """Normal values cut at two standard deviations, as the published initialisation."""
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std)

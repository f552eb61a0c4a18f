"""BERT and its modern form for pre-training: masked language modelling and next-sentence prediction on packed rows.

A row holds several sequences, and a sequence's output does not depend on what it is packed with. Losses are sums in fp32,
never means: the caller knows the counts of the whole update. The decoder shares the word embedding's weight if `tied`.
Dropout is a function of a seed tensor (or of torch's generator, in some of torch's backends), so that recomputation
replays it. `megabert.ops` chooses how an operation runs: our kernel, torch's, or compiled.

Shapes: B rows, T tokens a row, D hidden, H heads, F feed-forward, V vocabulary, S sequences a row, K predictions a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megabert.config import ModelConfig, OpsConfig
from megabert.ops import Ops, Rotation, choose_all, embedding, norm, rotation

# `neighbour_heads`: attention logit at the neighbour. Only columns that rotate by at least SLOWEST rad a position
# contribute.
PEAK, SLOWEST = 9.0, 0.09


def truncated_normal(shape: tuple[int, ...], std: float) -> Tensor:
    """Normal values cut at two standard deviations, as the published initialisation (Devlin et al. 2019)."""
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode and without gradients inside the block, which leaves train/eval as it was."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


class Linear(nn.Module):
    """y = x W^T + b. weight [out, in], bias [out] or None."""

    # rows of the matrices stacked in `weight`, each of which Muon orthogonalises; none: not for Muon
    matrices: tuple[int, ...] = ()

    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, std: float, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(truncated_normal((outputs, inputs), std))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs)) if bias else None)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # (..., in) -> (..., out)
        """x W^T + bias. Inference with packed weights puts its own product in its place."""
        return F.linear(x, self.weight, bias)

    def forward(self, x: Tensor) -> Any:  # (..., in) -> (..., out)
        return self.matmul(x, self.bias)


class QKVProjection(Linear):
    """The projection in front of attention: queries, keys, values, each head by head.

    `sums_bias`: attention's backward pass sums the bias's gradient while it writes that of its input. Then the bias is
    returned beside the result, for `Ops.attention`, and the product does not sum it again.
    """

    def __init__(self, cfg: ModelConfig, ops: Ops):
        heads, shared = cfg.heads, cfg.key_heads
        super().__init__(cfg.hidden, cfg.qkv_columns, cfg.init_std, cfg.layer_bias)
        self.heads, self.shared = heads, shared
        self.matrices = (cfg.hidden, *[(cfg.qkv_columns - cfg.hidden) // 2] * 2)
        self.sums_bias = ops.attention_sums_bias and not cfg.gated and cfg.bias and heads == shared

    @torch.no_grad()
    def init_neighbour_heads(self, theta: float) -> None:
        """Initialise the biases so that head 0 attends to the previous token and head 1 to the next one.

        The query bias is the key bias rotated by one position, so at distance d from the neighbour the biases add
        PEAK · mean(cos(d · angle)) to the logit, over the column pairs that rotate by at least SLOWEST rad a
        position.
        """
        assert self.bias is not None
        head = self.weight.shape[1] // self.heads
        cos, sin = (turn[0] for turn in rotation(torch.ones(1), head, theta))  # of one position, (d / 2)
        fast = (cos <= math.cos(SLOWEST)).float()
        size = (PEAK * head**0.5 / fast.sum()).sqrt() * fast
        bias = self.bias.view(-1, 2, head // 2)  # rotary positions turn column i with column i + d / 2
        bias[self.heads : self.heads + self.shared, 0] = size
        bias[:2, 0] = size * cos
        bias[0, 1], bias[1, 1] = -size * sin, size * sin

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # (B, T, D) -> (B, T, 3D), (3D)
        if not self.sums_bias:
            y = self.matmul(x, self.bias)
            return y if self.heads == self.shared else self._repeat_kv(y), None
        assert self.bias is not None
        return self.matmul(x, self.bias.detach()), self.bias.view_as(self.bias)

    def _repeat_kv(self, y: Tensor) -> Tensor:
        """Each head of keys and values for all heads of its group (Ainslie et al. 2023, "GQA"): (B, T, (H + 2G) d) -> (B, T, 3D)."""
        groups, heads = self.heads // self.shared, y.unflatten(-1, (self.heads + 2 * self.shared, -1))
        q, kv = heads.split([self.heads, 2 * self.shared], -2)  # (B, T, H, d), (B, T, 2G, d)
        return torch.cat([q, kv.repeat_interleave(groups, -2)], -2).flatten(-2)


class FeedForward(Linear):
    """gelu(x W^T + b), the exact (erf) one. Gated: gelu(a) * b of (a, b) = x W^T + b, W [2F, D], or silu(a) * b."""

    def __init__(self, cfg: ModelConfig, ops: Ops):
        super().__init__(cfg.hidden, cfg.ffn_inputs, cfg.init_std, cfg.layer_bias)
        self.silu = cfg.activation == "silu"
        self.gated, self.matrices, self.ops = cfg.gated, (cfg.ffn,) * (2 if cfg.gated else 1), ops

    def forward(self, x: Tensor) -> Tensor:
        y = self.matmul(x)  # (..., D) -> (..., F), gated (..., 2F)
        if self.gated:
            return self.ops.bias_geglu(y, self.bias, silu=self.silu)  # (..., F)
        return self.ops.bias_gelu(y, self.bias)  # (..., F)


def norm_parameters(cfg: ModelConfig) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight and bias [D] of a norm."""
    shifted = cfg.bias and not cfg.rms_norm
    return nn.Parameter(torch.ones(cfg.hidden)), nn.Parameter(torch.zeros(cfg.hidden)) if shifted else None


class LinearNorm(Linear):
    """Output projection of a residual branch: z = residual + dropout(x W^T + b), and LayerNorm(z)."""

    def __init__(self, inputs: int, cfg: ModelConfig, ops: Ops):
        super().__init__(inputs, cfg.hidden, cfg.init_std, cfg.layer_bias)
        self.matrices = (cfg.hidden,)
        self.norm_weight, self.norm_bias = norm_parameters(cfg)
        self.cfg, self.ops = cfg, ops
        if cfg.zero_init:
            nn.init.zeros_(self.weight)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor, seed: Tensor, stream: int
    ) -> tuple[Tensor, Tensor]:
        """(..., in), (..., D) -> (normed, residual), both (..., D): the input of the next branch and the residual
        stream, which is z for pre-LN and LayerNorm(z) for post-LN."""
        p = self.cfg.dropout if self.training else 0.0
        y = self.matmul(x)  # (..., in) -> (..., D)
        return self.ops.dropout_add_layer_norm(
            y, self.bias, residual, self.norm_weight, self.norm_bias, p, self.cfg.layer_norm_eps, seed, stream,
            post=self.cfg.norm == "post", rms=self.cfg.rms_norm,
        )  # fmt: skip


class Layer(nn.Module):
    """Self-attention and feed-forward, each with its residual (Vaswani et al. 2017; pre-LN: Xiong et al. 2020)."""

    def __init__(self, cfg: ModelConfig, ops: Ops, index: int):
        super().__init__()
        self.window = cfg.layer_window(index)
        self.qkv = QKVProjection(cfg, ops)
        if cfg.neighbour_heads:
            self.qkv.init_neighbour_heads(cfg.layer_theta(index))
        self.attention_output = LinearNorm(cfg.hidden, cfg, ops)
        self.feed_forward = FeedForward(cfg, ops)
        self.feed_forward_output = LinearNorm(cfg.ffn, cfg, ops)
        self.cfg, self.ops = cfg, ops

    def forward(
        self, normed: Tensor, x: Tensor, keys: list[Tensor], seed: Tensor, stream: int, keep: Tensor | None = None,
        angles: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(normed, residual) [B, T, D] -> the same; with `keep`, only those flat positions [N] or [B, J] -> [..., D].

        `keys`: which keys a token attends to (`Ops.attention_inputs`); `stream` numbers the first dropout mask."""
        y = self.attention(normed, keys, seed, stream, angles)  # (B, T, D)
        if keep is not None:
            at, shape = keep.flatten(), keep.shape
            y, x = (t.flatten(0, 1).index_select(0, at).unflatten(0, shape) for t in (y, x))  # (..., D)
        normed, x = self.attention_output(y, x, seed, stream + 1)
        y = self.feed_forward(normed)  # (..., F)
        return self.feed_forward_output(y, x, seed, stream + 2)

    def attention(self, x: Tensor, keys: list[Tensor], seed: Tensor, stream: int, angles: Rotation | None) -> Tensor:
        p, heads = self.cfg.attention_dropout if self.training else 0.0, self.cfg.heads
        qkv, bias = self.qkv(x)  # (B, T, 3D)
        if angles is not None:
            qkv = self.ops.rotate(qkv, heads, angles)  # (B, T, 3D)
        return self.ops.attention(qkv, heads, keys, p, seed, stream, bias=bias, window=self.window)  # (B, T, D)


class WordEmbedding(nn.Module):
    """Word embedding and decoder: one tied weight [V', D], or two; V' is V padded to a multiple of 128.

    Padding entries are zero, are never looked up or predicted, and get zero gradients. Embedding and decoder are both
    calls of this module, since ZeRO-3 gathers a module's weights when it is called.
    """

    bias: nn.Parameter | None
    decoder: nn.Parameter | None

    def __init__(self, cfg: ModelConfig, ops: Ops):
        super().__init__()
        self.size, self.ops = cfg.vocab_size, ops
        self.weight = nn.Parameter(self._table(cfg))
        self.register_parameter("bias", nn.Parameter(torch.zeros(cfg.padded_vocab)) if cfg.decoder_bias else None)
        self.register_parameter("decoder", None if cfg.tied else nn.Parameter(self._table(cfg)))

    @staticmethod
    def _table(cfg: ModelConfig) -> Tensor:
        weight = truncated_normal((cfg.padded_vocab, cfg.hidden), cfg.init_std)
        weight[cfg.vocab_size :] = 0
        return weight

    def forward(
        self, ids: Tensor | None = None, hidden: Tensor | None = None, labels: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """ids -> embeddings [..., D]; hidden [N, D] and labels [N] -> (loss sum, correct), with `groups` (bool [G, N]) both of
        each group too, [G]; hidden -> logits [N, V]."""
        if ids is not None:
            return embedding(ids, self.weight)
        assert hidden is not None
        weight = self.weight if self.decoder is None else self.decoder
        bias = weight.new_zeros(len(weight)) if self.bias is None else self.bias
        if labels is None:
            return self.ops.mlm_logits(hidden, weight, bias, self.size)
        total = self.ops.mlm_loss(hidden, weight, bias, labels, self.size)
        return (
            total if groups is None else (*total, *self.ops.mlm_losses(hidden, weight, bias, labels, self.size, groups))
        )


class Embeddings(nn.Module):
    """Word + position + segment embeddings, LayerNorm, dropout. `nomic` has no positions. `modern` has words only, and
    with `embedding_norm` their norm is also the residual."""

    def __init__(self, cfg: ModelConfig, ops: Ops):
        super().__init__()
        self.word = WordEmbedding(cfg, ops)
        if not cfg.gated:
            positions = cfg.first_position + cfg.max_positions
            self.position = nn.Parameter(truncated_normal((positions, cfg.hidden), cfg.init_std))
        if not cfg.modern:
            self.segment = nn.Parameter(truncated_normal((cfg.segments, cfg.hidden), cfg.init_std))
        self.norm_weight, self.norm_bias = norm_parameters(cfg)
        self.cfg, self.ops = cfg, ops

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """int32 [B, T] each -> (normed, residual), both [B, T, D]."""
        x = self.word(input_ids)  # (B, T, D)
        if not self.cfg.gated:
            x = x + embedding(position_ids + self.cfg.first_position, self.position)
        if not self.cfg.modern:
            x = x + (embedding(segment_ids, self.segment) if self.cfg.segments > 1 else self.segment)
        p = self.cfg.dropout if self.training else 0.0
        from_norm = self.cfg.norm == "post" or (self.cfg.modern and self.cfg.embedding_norm)
        if not from_norm:  # the norm is the first layer's
            x = self.ops.dropout(x, p, seed, 0)
        normed = norm(x, self.norm_weight, self.norm_bias, self.cfg.layer_norm_eps, self.cfg.rms_norm)
        if from_norm:
            x = normed = self.ops.dropout(normed, p, seed, 0)
        return normed, x


class MlmTransform(Linear):
    """Dense + GELU + LayerNorm in front of the decoder. `nomic`: with the activation of its layers."""

    def __init__(self, cfg: ModelConfig, ops: Ops):
        super().__init__(cfg.hidden, cfg.hidden, cfg.init_std, cfg.bias)
        self.norm_weight, self.norm_bias = norm_parameters(cfg)
        self.activate = ops.bias_silu if cfg.kind == "nomic" and cfg.activation == "silu" else ops.bias_gelu
        self.cfg = cfg

    def forward(self, x: Tensor) -> Tensor:  # (N, D) -> (N, D)
        y = self.activate(self.matmul(x), self.bias)
        return norm(y, self.norm_weight, self.norm_bias, self.cfg.layer_norm_eps, self.cfg.rms_norm)


class Output(NamedTuple):
    """Loss sums, then as many counts of correct answers, in the order of `BertForPreTraining.terms`."""

    mlm_loss_sum: Tensor  # fp32, over predictions
    nsp_loss_sum: Tensor  # fp32, over pairs with a label
    mlm_correct: Tensor  # int64, as the next
    nsp_correct: Tensor


class BertForPreTraining(nn.Module):
    """`forward` trains, `encode` gives hidden states; `backends` holds what each operation runs on, and why.

    device ("cpu", "cuda"), dtype (compute type) and `causal` decide what the backend `auto` means; `causal`: batches
    may be causal without passing `causal` to `forward`. Raises ValueError if `vocab_size` is 0 or a backend cannot run.
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
            raise ValueError("model.vocab_size=0: set it to the tokenizer's vocabulary size")
        self.cfg = cfg
        # Names of the loss terms, "" for an unused one, and their weights in the total loss.
        self.terms: tuple[str, ...] = ("mlm", "nsp" if cfg.nsp else "")
        self.weights: tuple[float, ...] = (1.0, 1.0)
        self.backends = choose_all(ops or OpsConfig(), device, dtype, causal, cfg.hidden // cfg.heads)
        if self.backends.attention.name == "flash3" and cfg.attention_dropout:
            raise ValueError(
                "ops.attention=flash3 has no dropout: add model.attention_dropout=0, or choose another backend"
            )
        self.ops = Ops(self.backends)
        self.embeddings = Embeddings(cfg, self.ops)
        self.layers = nn.ModuleList(self.ops.layer(Layer(cfg, self.ops, index)) for index in range(cfg.layers))
        self.mlm = MlmTransform(cfg, self.ops) if cfg.transform else nn.Identity()
        if cfg.nsp:
            self.pooler = Linear(cfg.hidden, cfg.hidden, cfg.init_std)
            self.nsp = Linear(cfg.hidden, 2, cfg.init_std)

    @torch.no_grad()
    def init_decoder_bias(self, counts: Tensor) -> None:
        """Set the decoder's bias in place to the log frequencies of ids, with add-one smoothing. `counts`: int64 [V].

        Call it before the engine copies the weights.
        """
        shares = (counts.double() + 1) / (counts.sum() + len(counts))
        assert self.embeddings.word.bias is not None
        self.embeddings.word.bias[: self.cfg.vocab_size] = shares.log().float()

    def encode(self, *inputs: Tensor, **more: Any) -> Tensor:
        """Hidden states [B, T, D], with `keep` [N, D] or [B, J, D]: the last ones of `states`, whose arguments these are."""
        for normed, _residual in self.states(*inputs, **more):
            last = normed
        return last

    def hidden_states(self, *inputs: Tensor, count: int | None = None, **more: Any) -> list[Tensor]:
        """L + 1 tensors [B, T, D]: the embeddings, then the output of each layer; the last equals `encode`. `count`:
        return only the first `count`, without computing later layers. Other arguments: see `states`.

        Equal to transformers' `output_hidden_states`: for post-LN the norms, for pre-LN the residual stream, normalised
        only after the last layer.
        """
        states = enumerate(islice(self.states(*inputs, **more), count))
        return [normed if index == len(self.layers) else residual for index, (normed, residual) in states]

    def states(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, key_start: Tensor, key_end: Tensor,
        lengths: Tensor, keep: Tensor | None = None, seed: Tensor | None = None, causal: Any = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
        """(normed, residual) [B, T, D] of the embeddings and of each layer, as they are computed, of int32 [B, T] inputs (lengths
        [B, S]); a token attends to [key_start, key_end), of which varlen attention knows only whether they are `causal`.

        With `keep` (int flat positions [N] or [B, J]) the last layer computes only those: [N, D] or [B, J, D], the same
        values. seed int64 [1] decides the dropout masks of native backends; without it, it is drawn from torch's generator.
        With a second element, the index of the batch's first row in the update, a row's masks do not depend on its batch.
        """
        if seed is None:
            seed = torch.randint(2**62, (1,), device=input_ids.device)
        size = self.cfg.hidden // self.cfg.heads
        kinds = {(self.cfg.layer_window(index), self.cfg.layer_theta(index)) for index in range(len(self.layers))}
        keys = {w: self.ops.attention_inputs(key_start, key_end, lengths, w, causal) for w, _ in kinds}
        angles = {theta: rotation(position_ids, size, theta) for _, theta in kinds} if self.cfg.gated else {}
        normed, x = self.embeddings(input_ids, segment_ids, position_ids, seed)  # (B, T, D) each
        yield normed, x
        for index, layer in enumerate(self.layers):
            last = keep if index == len(self.layers) - 1 else None
            seen = keys[self.cfg.layer_window(index)]
            if last is not None and not self.training:
                seen = self.ops.only_queries(seen, last)
            args = (normed, x, seen, seed, 4 * index + 4, last, angles.get(self.cfg.layer_theta(index)))
            if self.cfg.activation_checkpointing and self.training:
                normed, x = checkpoint(layer, *args, use_reentrant=False)
            else:
                normed, x = layer(*args)
            yield normed, x

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, position_ids: Tensor | None = None,
        key_start: Tensor | None = None, key_end: Tensor | None = None, lengths: Tensor | None = None,
        cls_positions: Tensor | None = None, nsp_labels: Tensor | None = None, mlm_positions: Tensor | None = None,
        mlm_labels: Tensor | None = None, seed: Tensor | None = None, logits_at: Tensor | None = None,
        causal: Any = False, sources: Tensor | None = None,
    ) -> Output | Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Loss sums and correct counts of a packed batch (shapes as in `states`); with `logits_at`, int flat positions [N],
        only the logits there over the real vocabulary [N, V]. Of ids alone, as in `unpacked_inputs`, all logits [B, T, V].

        cls_positions int32 [B, S], nsp_labels int64 [B, S], mlm_positions int32 [B, K], mlm_labels int64 [B, K]:
        flat positions into B * T and labels, -100 where there is nothing to predict. With `sources`, bool [N, B, K], MLM's loss
        sums and correct counts of each source follow those of `terms`.
        """
        if key_end is None:
            unpacked = unpacked_inputs(input_ids, segment_ids, causal)
            hidden = self.encode(**unpacked, seed=seed, causal=causal)  # (B, T, D)
            return self.mlm_logits(hidden.flatten(0, 1)).unflatten(0, input_ids.shape)
        assert segment_ids is not None and position_ids is not None and key_start is not None and lengths is not None
        inputs = (input_ids, segment_ids, position_ids, key_start, key_end, lengths)
        if logits_at is not None:
            return self.mlm_logits(self.encode(*inputs, keep=logits_at, seed=seed, causal=causal))
        assert mlm_positions is not None and mlm_labels is not None
        assert cls_positions is not None and nsp_labels is not None
        slots = mlm_positions.shape[1]
        keep = torch.cat([mlm_positions, cls_positions], 1) if self.cfg.nsp else mlm_positions  # (B, K + S)
        hidden = self.encode(*inputs, keep=keep, seed=seed, causal=causal)  # (B, K + S, D)
        predicted = self.mlm(hidden[:, :slots].flatten(0, 1))  # (B * K, D)
        groups = None if sources is None else sources.flatten(1)  # (N, B * K)
        labels = mlm_labels.flatten()
        mlm_loss, mlm_correct, *by_source = self.embeddings.word(hidden=predicted, labels=labels, groups=groups)
        nsp_loss, nsp_correct = mlm_loss.new_zeros(()), torch.zeros_like(mlm_correct)
        if self.cfg.nsp:
            logits = self.nsp_logits(hidden[:, slots:].flatten(0, 1)).float()  # (B * S, 2)
            labels = nsp_labels.flatten()
            nsp_loss = F.cross_entropy(logits, labels, reduction="sum")
            nsp_correct = (logits.argmax(-1) == labels).sum()
        if not by_source:
            return Output(mlm_loss, nsp_loss, mlm_correct, nsp_correct)
        return mlm_loss, nsp_loss, *by_source[0], mlm_correct, nsp_correct, *by_source[1]

    def counts(self, batch: Any) -> tuple[int, ...]:
        """Number of items in each loss sum of a batch on the CPU: predictions, pairs, then predictions of each
        source."""
        of_sources = () if batch.sources is None else batch.sources.sum((1, 2)).tolist()
        return batch.predictions, batch.nsp_pairs if self.cfg.nsp else 0, *of_sources

    def mlm_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] -> logits over the real vocabulary [N, V]."""
        return self.embeddings.word(hidden=self.mlm(hidden))

    def nsp_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of [CLS] [N, D] -> logits [N, 2], class 0: the second part really follows."""
        return self.nsp(torch.tanh(self.pooler(hidden)))


def unpacked_inputs(ids: Tensor, segment_ids: Tensor | None = None, causal: bool = False) -> dict[str, Tensor]:
    """The inputs of `states` for int ids [B, T] with one sequence a row, padded at its end with id 0. `causal`: a token
    attends only to itself and to the tokens before it."""
    ids = ids.int()
    places = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device).expand_as(ids)
    lengths = ((places + 1) * (ids != 0)).amax(1, keepdim=True)  # (B, 1)
    ends = (places + 1 if causal else lengths) * (places < lengths)
    none = torch.zeros_like(ids)
    return {
        "input_ids": ids,
        "segment_ids": none if segment_ids is None else segment_ids.int(),
        "position_ids": places * (places < lengths),
        "key_start": none,
        "key_end": ends,
        "lengths": lengths,
    }


def meta_model(cfg: ModelConfig) -> BertForPreTraining:
    """The model on the `meta` device: names and shapes of its parameters, without their memory."""
    with torch.device("meta"):
        return BertForPreTraining(cfg, OpsConfig(attention="sdpa", mlm_loss="torch", layer="torch"))


def parameter_count(cfg: ModelConfig) -> int:
    """Parameters of the model, padded vocabulary entries left out."""
    total = sum(p.numel() for p in meta_model(cfg).parameters())
    return total - (cfg.padded_vocab - cfg.vocab_size) * (cfg.hidden * (1 if cfg.tied else 2) + cfg.decoder_bias)

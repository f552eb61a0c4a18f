"""An encoder whose output is one vector a text, and the contrastive loss it is trained by.

The loss of a pair is the cross-entropy of its second text among all second texts and hard negatives of the update, on all
ranks, by cosine / temperature (InfoNCE, van den Oord et al. 2018; in-batch negatives: Henderson et al. 2017, section 4.4,
Multiple Negatives Ranking). Where both texts of a pair are one, two dropout masks make its two vectors (Gao, Yao and Chen
2021, SimCSE). A candidate that is the pair's own second text once more, or another one of its first text, is no negative.

Texts are encoded in chunks whose activations are computed again in the backward pass, so that memory is bound by the
chunk and not by the batch, with the gradients of the whole (gradient caching: Gao, Zhang, Han and Callan 2021, section 3).

Shapes: n pairs of this rank, N ranks, R candidates of a rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megabert.config import Config, OpsConfig
from megabert.data.packing import groups
from megabert.distributed.process_group import World
from megabert.finetune.batches import EVALUATION_TOKENS, Layout, collate
from megabert.finetune.embed.batches import NONE
from megabert.finetune.encoding import Item
from megabert.finetune.heads import without_heads
from megabert.model import BertForPreTraining

POOLS = ("mean", "cls")


class Embedder(nn.Module):
    """`vectors` of texts, and in `forward` the contrastive loss of pairs."""

    def __init__(
        self,
        encoder: BertForPreTraining,
        causal: bool,
        pool: str,
        world: World,
        temperature: float = 1.0,
        normalise: bool = True,
    ) -> None:
        """`encoder` loses its pre-training heads. `normalise`: vectors have length 1; the loss takes them so in any case."""
        super().__init__()
        assert pool in POOLS
        self.terms, self.weights = ("contrastive",), (1.0,)
        self.causal, self.pool, self.normalise = causal, pool, normalise
        self.world, self.temperature = world, temperature
        self.encoder = without_heads(encoder)

    def layout(self, max_length: int) -> Layout:
        """How texts become batches."""
        return Layout("embed", max_length, self.causal)

    def vectors(self, read: Tensor, places: None = None, **inputs: Tensor) -> Tensor:
        """fp32 [n, D] of the texts whose first tokens (left to right: last) are at `read` (int64 [n]) in packed `inputs`."""
        if self.pool == "cls":
            found = self.encoder.encode(**inputs, keep=read).float()
        else:
            found = _means(self.encoder.encode(**inputs).float(), inputs["key_start"], inputs["key_end"], read)
        return F.normalize(found, dim=-1) if self.normalise else found

    def forward(
        self,
        chunks: Sequence[Mapping[str, Any]],
        first: Tensor,
        second: Tensor,
        own: Tensor,
        candidates: Tensor,
        owners: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Loss sum over this rank's pairs, and of how many the own second text is the nearest; arguments as in `Contrast`."""
        found = [
            self.vectors(**chunk) if len(chunks) == 1 else checkpoint(self.vectors, use_reentrant=False, **chunk)
            for chunk in chunks
        ]
        texts = F.normalize(torch.cat(found), dim=-1)  # (n + own candidates, D)
        count, width = len(first), len(candidates) // self.world.size
        mine = F.pad(texts[count:], (0, 0, 0, width - (len(texts) - count)))  # (R, D)
        logits = texts[:count] @ gathered(mine, self.world).T / self.temperature  # (n, N * R)
        out = (candidates == second[:, None]) | (owners == first[:, None]) | (candidates == NONE)
        logits = logits.masked_fill(out.scatter(1, own[:, None], False), -torch.inf)
        loss = F.cross_entropy(logits, own, reduction="sum")
        return loss, (logits.argmax(-1) == own).sum() if count else own.sum()

    def counts(self, batch: Any) -> tuple[int, ...]:
        """Over how many pairs the loss of `batch` is summed."""
        return (batch.items,)


def _means(hidden: Tensor, key_start: Tensor, key_end: Tensor, read: Tensor) -> Tensor:
    """Means over the tokens of packed texts: hidden [B, T, D], the keys' int32 [B, T] -> [n, D] of the texts read at [n]."""
    rows, width, _ = hidden.shape
    texts = (key_start.long() + width * torch.arange(rows, device=hidden.device)[:, None]).flatten()
    real = (key_end > 0).flatten()[:, None]  # (B * T, 1); padding points to its row's first text
    sums = torch.zeros_like(hidden).flatten(0, 1).index_add(0, texts, hidden.flatten(0, 1).where(real, 0.0))
    counts = hidden.new_zeros(rows * width, 1).index_add(0, texts, real.to(hidden.dtype))
    begins = texts[read]
    return sums[begins] / counts[begins]


class _Gather(torch.autograd.Function):
    """All ranks' [R, D] as [N * R, D], in rank order; a rank's part has the gradients of all ranks' losses, summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, world: World) -> Tensor:
        ctx.rank, ctx.rows = world.rank, len(own)
        parts = [torch.empty_like(own) for _ in range(world.size)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (whole,) = (gradient.contiguous() for gradient in gradients)
        dist.all_reduce(whole)
        return whole[ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows], None


def gathered(own: Tensor, world: World) -> Tensor:
    """fp32 [N * R, D] of every rank's [R, D]. A collective, in the backward pass too."""
    return own if world.size == 1 else _Gather.apply(own, world)


def build(
    config: Config, weights: Mapping[str, Tensor] | None, pool: str, world: World, dtype: torch.dtype, **options: Any
) -> Embedder:
    """The module with fp32 weights; `weights` are a pre-trained model's by name, None: random, as torch's generator says.

    `dtype`: the compute type it will be trained or used in; `options` are Embedder's.
    """
    causal = config.data.masking.causal
    encoder = BertForPreTraining(config.model, OpsConfig(), world.device.type, dtype, causal)
    if weights is not None:
        encoder.load_state_dict(weights)
    return Embedder(encoder, causal, pool, world, **options)


@torch.no_grad()
def vectors_of(
    module: Embedder,
    items: Sequence[Item],
    max_length: int,
    world: World,
    tokens: int = EVALUATION_TOKENS,
    progress: Callable[[], None] = lambda: None,
) -> Tensor:
    """fp32 [n, D] of every item, on every rank, `tokens` tokens at a time, after each of which `progress` is called. A collective.

    Dropout is off; the module's mode is afterwards as before.
    """
    training, layout = module.training, module.layout(max_length)
    module.eval()
    size = module.encoder.cfg.hidden
    found = torch.zeros(len(items), size, device=world.device)
    for group in groups([len(item.ids) for item in items], tokens)[world.rank :: world.size]:
        batch = collate([items[i] for i in group], layout).to(world.device)
        found[torch.tensor(group, device=world.device)] = module.vectors(**batch.reading())  # type: ignore[arg-type]
        progress()
    if world.size > 1:
        dist.all_reduce(found)
    module.train(training)
    return found

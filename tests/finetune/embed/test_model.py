"""Vectors do not depend on the batch; the loss and its gradients not on chunks and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import hf as pretrained
from megabert.distributed.process_group import World
from megabert.finetune.embed import batches, model
from megabert.finetune.embed.batches import Contrast
from megabert.finetune.embed.model import Embedder
from megabert.finetune.embed.pairs import Pairs
from megabert.hf import Pretrained
from tests.helpers import finetune_problem, runs
from tests.helpers.ranks import run_ranks

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10", "w11 w2", "w12 w13 w14 w15", "w16", "w17 w18"]
# Pairs 0 and 3 share the second text, pairs 1 and 2 the first one; text 6 is a hard negative of pairs 0 and 2
PAIRS = Pairs(
    TEXTS,
    np.array([0, 1, 1, 5]),
    np.array([2, 3, 4, 2]),
    [np.array([6]), np.array([], np.int64), np.array([6, 0]), np.array([], np.int64)],
)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Pretrained:
    return pretrained.load(finetune_problem.write_run(tmp_path_factory.mktemp("embed") / "run"))


def embedder(start: Pretrained, world: World, pool: str = "mean", dropout: float = 0.0, **options: Any) -> Embedder:
    changed = {"dropout": dropout, "attention_dropout": dropout}
    config = start.config.model_copy(update={"model": start.config.model.model_copy(update=changed)})
    return model.build(config, start.weights, pool, world, torch.float32, **options)


def contrast(start: Pretrained, module: Embedder, shares: list[list[int]], rank: int = 0, chunk: int = 0) -> Contrast:
    items = batches.encode(TEXTS, start.tokenizer, 32)
    parts = [np.array(share, np.int64) for share in shares]
    return batches.contrast(PAIRS, items, module.layout(32), parts, rank, chunk)


def gradients(module: Embedder, batch: Contrast, seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(seed)
    module.zero_grad()
    loss, _ = module(**batch.inputs())
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pool", model.POOLS)
def test_a_vector_is_pooled_from_its_own_tokens(pool: str, causal: bool, tmp_path, world) -> None:
    found = pretrained.load(runs.make(tmp_path / "run", "uncased", causal=causal))
    texts = ["She sells sea shells.", "dog", "The quick brown fox jumps over the lazy dog."]
    module = embedder(found, world, pool, normalise=False)
    items = batches.encode(texts, found.tokenizer, 40)
    together = model.vectors_of(module, items, 40, world)
    bert = found.model(torch.device("cpu"))
    for vector, item in zip(together, items, strict=True):
        n = len(item.ids)
        ids = torch.tensor(item.ids)[None]
        place = torch.arange(n, dtype=torch.int32)[None]
        ends = place + 1 if causal else torch.full_like(place, n)
        with torch.no_grad():
            args = (
                ids,
                torch.zeros_like(ids),
                place,
                torch.zeros_like(place),
                ends,
                torch.tensor([[n]], dtype=torch.int32),
            )
            (states,) = bert.encode(*args)
        wanted = states.mean(0) if pool == "mean" else states[-1 if causal else 0]
        assert torch.allclose(vector, wanted, atol=1e-5)
    assert module.training  # as before


def test_the_loss_is_the_cross_entropy_among_what_does_not_belong(start, world) -> None:
    module = embedder(start, world, temperature=0.1)
    vectors = F.normalize(model.vectors_of(module, batches.encode(TEXTS, start.tokenizer, 32), 32, world), dim=1)
    cosines = vectors @ vectors.T / 0.1
    # pair -> its second text and what it is compared with, by texts: no second text twice, none that its first text has
    compared = {0: [2, 3, 4, 6, 6, 0], 1: [3, 2, 2, 6, 6, 0], 2: [4, 2, 2, 6, 6, 0], 3: [2, 3, 4, 6, 6, 0]}
    wanted = sum(
        F.cross_entropy(cosines[PAIRS.first[pair], others], torch.tensor(0)) for pair, others in compared.items()
    )
    loss, right = module.eval()(**contrast(start, module, [[0, 1, 2, 3]]).inputs())
    assert float(loss.detach()) == pytest.approx(float(wanted), abs=1e-4)
    assert right == sum(int(cosines[PAIRS.first[pair], others].argmax() == 0) for pair, others in compared.items())


@pytest.mark.parametrize("pool", model.POOLS)
def test_chunks_have_the_gradients_of_the_whole(pool: str, start, world) -> None:
    module = embedder(start, world, pool)
    whole, wanted = gradients(module, contrast(start, module, [[0, 1, 2, 3]]))
    cached, found = gradients(module, contrast(start, module, [[0, 1, 2, 3]], chunk=3))
    assert cached == pytest.approx(whole, abs=1e-4) and found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)


def test_chunks_are_computed_again_with_the_same_dropout(start, world, monkeypatch) -> None:
    module = embedder(start, world, dropout=0.3)
    batch = contrast(start, module, [[0, 1, 2, 3]], chunk=3)
    _, found = gradients(module, batch, seed=5)

    def keeping(function: Any, use_reentrant: bool, preserve_rng_state: bool = True, **inputs: Tensor) -> Any:
        return function(**inputs)

    monkeypatch.setattr(model, "checkpoint", keeping)
    _, kept = gradients(module, batch, seed=5)
    assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_what_the_forward_pass_keeps_does_not_grow_with_the_batch(start, world) -> None:
    module = embedder(start, world)

    def kept(chunk: int, pairs: list[int]) -> int:
        sizes: list[int] = []
        batch = contrast(start, module, [pairs], chunk=chunk)

        def count(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size() if tensor.is_floating_point() else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            module(**batch.inputs())
        return sum(sizes)

    assert kept(4, [0, 1, 2, 3]) < kept(0, [0, 1, 2, 3]) / 10


def test_one_text_has_two_vectors_under_dropout(start, world) -> None:
    """What SimCSE learns from; without dropout its two vectors are one."""
    alone = Pairs(TEXTS, np.arange(7), np.arange(7), [np.zeros(0, np.int64)] * 7)
    for dropout, same in ((0.0, True), (0.2, False)):
        module = embedder(start, world, dropout=dropout, temperature=1.0)
        items = batches.encode(TEXTS, start.tokenizer, 32)
        batch = batches.contrast(alone, items, module.layout(32), [np.arange(7)], 0, 0)
        with torch.no_grad():
            vectors = module.vectors(**batch.chunks[0].reading())
        assert torch.allclose(vectors[:7], vectors[7:], atol=1e-5) is same


def _on_ranks(world: World, folder: str, shares: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    start = pretrained.load(folder)
    module = embedder(start, world)
    loss, found = gradients(module, contrast(start, module, shares, world.rank, chunk=2))
    for gradient in found.values():
        torch.distributed.all_reduce(gradient)
    return loss, found


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("shares", [[[0, 1], [2, 3]], [[0, 1, 2, 3], []]], ids=["even", "one has none"])
def test_ranks_compare_with_the_texts_of_all_of_them(shares, start, world) -> None:
    module = embedder(start, world)
    whole, wanted = gradients(module, contrast(start, module, [[0, 1, 2, 3]]))
    ranks = run_ranks(2, _on_ranks, str(start.run_dir), shares)
    assert sum(loss for loss, _ in ranks) == pytest.approx(whole, abs=1e-4)
    for _, found in ranks:
        assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)

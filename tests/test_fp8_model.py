"""FP8 inside the model: which linears, recomputation, and what GELU and LayerNorm round themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megabert.config import ModelConfig
from megabert.model import BertForPreTraining
from megabert.ops import fp8
from tests.helpers import tiny
from tests.ops.oracle import needs_library

CPU = torch.device("cpu")


def model(**changes: Any) -> BertForPreTraining:
    torch.manual_seed(3)
    cfg = ModelConfig(layers=4, hidden=32, heads=2, vocab_size=tiny.VOCAB, max_positions=tiny.LENGTH, **changes)
    return BertForPreTraining(cfg).bfloat16()


def step(bert: BertForPreTraining, rows: int = 8) -> tuple[float, list[Tensor]]:
    bert.zero_grad()
    out = bert(**tiny.batch(0, range(rows)).inputs(), seed=torch.tensor([5]))
    (out.mlm_loss_sum + out.nsp_loss_sum).backward()
    return out.mlm_loss_sum.item(), [p.grad.clone() for p in bert.parameters() if p.grad is not None]


def test_first_and_last_layer_heads_and_evaluation_are_bf16() -> None:
    plain, bert = model(), model()
    scaling = bert.use_fp8(CPU, 1)
    names = [name for name, module in bert.named_modules() if getattr(module, "fp8", None) is not None]
    parts = ("qkv", "attention_output", "feed_forward", "feed_forward_output")
    assert names == [f"layers.{layer}.{part}" for layer in (1, 2) for part in parts]
    assert not list(bert.buffers()) and bert.state_dict().keys() == plain.state_dict().keys()
    first, _ = step(bert)
    assert first == step(plain)[0]
    scaling.end_update()
    assert (scaling.history[0] > 0).all()
    assert step(bert)[0] != first  # now in FP8
    before = scaling.amax.clone()
    inputs = tiny.batch(0, range(8)).inputs()
    with torch.no_grad():
        assert bert.eval()(**inputs).mlm_loss_sum.equal(plain.eval()(**inputs).mlm_loss_sum)
    assert scaling.amax.equal(before)


@pytest.mark.parametrize(
    "fields",
    [{"norm": "post"}, {"norm": "pre"}, {"kind": "modern", "norm": "pre", "nsp": False}],
    ids=["post", "pre", "modern"],
)
def test_recomputation_changes_no_bit(fields: dict[str, Any]) -> None:
    found = []
    for again in (False, True):
        bert = model(**fields, activation_checkpointing=again)
        scaling = bert.use_fp8(CPU, 1)
        for _ in range(2):
            loss, gradients = step(bert)
            scaling.end_update()
        found.append((loss, gradients, scaling.state()))
    (a, ours, history), (b, theirs, other) = found
    assert a == b and history == other and len(ours) == len(theirs)
    assert all(x.equal(y) for x, y in zip(ours, theirs, strict=True))


class Casts(TorchDispatchMode):
    """The shapes of what `cast_transpose` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "megabert::cast_transpose":
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@needs_library
@pytest.mark.parametrize(("norm", "again"), [("post", False), ("pre", False), ("pre", True)])
def test_gelu_and_norm_round_for_the_products_and_change_no_bit(norm: str, again: bool) -> None:
    """Losses, gradients and amax are those of separate casts. Of activations these read no more the feed-forward's, and of
    D columns the context and two gradients a layer; recomputation does it twice and keeps no rounded input."""
    found, rows, wide = [], 4, 4 * 32
    for apart in (True, False):
        bert = model(norm=norm, activation_checkpointing=again)
        scaling = bert.use_fp8(CPU, 1)
        if apart:
            for module in bert.modules():
                if hasattr(module, "following"):
                    module.following = None
        step(bert, rows)
        scaling.end_update()
        with Casts() as casts:
            result = step(bert, rows)
        scaling.end_update()
        narrow = (8 if again else 5) if apart else (6 if again else 3)
        tokens = rows * tiny.LENGTH
        assert ((tokens, wide) in casts.shapes) == apart and casts.shapes.count((tokens, 32)) == 2 * narrow
        found.append((*result, scaling.state()))
    (a, ours, history), (b, theirs, other) = found
    assert a == b and history == other and len(ours) == len(theirs)
    assert all(x.equal(y) for x, y in zip(ours, theirs, strict=True))


@needs_library
def test_where_a_native_cast_is_wrong_no_operation_rounds_for_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "wrong_cast", lambda device: "bias_gelu_cast")
    bert = model()
    assert bert.use_fp8(CPU, 1).backend == "torch"
    assert not any(getattr(module, "following", None) for module in bert.modules())

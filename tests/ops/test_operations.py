"""What holds for every native operation: torch's own checks, the same bits with any threads and strides, wrong arguments named."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megabert import ops
from tests.conftest import ROOT
from tests.ops.oracle import needs_library, normal

pytestmark = needs_library
SEED, P = torch.tensor([99]), 0.25


Shapes = tuple[tuple[int, ...], ...]


def ranges(x: Tensor, queries: int, keys: int) -> dict[str, Tensor]:
    """Key ranges [B, Q] of unequal sizes, that of every fifth query empty."""
    start = (torch.arange(queries) % 3).int().expand(len(x), -1).contiguous()
    return {"key_start": start, "key_end": torch.where(torch.arange(queries) % 5 == 4, start, keys).int()}


def labels(x: Tensor) -> Tensor:
    place = torch.arange(len(x))
    return torch.where(place % 4 == 1, -100, place % 6)


# An operation, and shapes of its inputs: few numbers, and more rows than one thread takes.
CASES: dict[str, tuple[Callable[..., Any], Shapes, Shapes]] = {
    "bias_gelu": (lambda x, b: ops.bias_gelu(x, b, "native"), ((3, 5), (5,)), ((3000, 64), (64,))),
    "bias_geglu": (lambda x, b: ops.bias_geglu(x, b, "native"), ((3, 10), (10,)), ((1500, 192), (192,))),
    "rotate": (
        lambda x: ops.rotate(x, 2, ops.rotation(torch.arange(x.shape[1]).expand(len(x), -1) * 3, x.shape[2] // 6), "native"),
        ((1, 3, 36),), ((2, 1500, 96),),
    ),
    "dropout": (lambda x: ops.dropout(x, P, SEED, 2, "native"), ((3, 9),), ((3000, 64),)),
    "dropout_add_layer_norm": (
        lambda x, b, r, w, s: ops.dropout_add_layer_norm(x, b, r, w, s, P, 1e-5, SEED, 2, "native"),
        ((3, 9), (9,), (3, 9), (9,), (9,)), ((3000, 64), (64,), (3000, 64), (64,), (64,)),
    ),
    "softmax_mask": (
        lambda x: ops.fused_softmax_mask(x, **ranges(x, *x.shape[2:]), scale=0.7, p=P, seed=SEED),
        ((1, 2, 3, 5),), ((2, 4, 256, 96),),
    ),
    "attention": (
        lambda x, b: ops.attend(
            x + b.detach(), 2, [*ranges(x, x.shape[1], x.shape[1]).values()], P, SEED, 1, "native", b
        ),
        ((1, 3, 24), (24,)), ((2, 64, 192), (192,)),
    ),
    "mlm_loss": (
        lambda h, w, b: ops.mlm_loss(h, w, b, labels(h), 6, "native")[0],
        ((3, 4), (8, 4), (8,)), ((1500, 16), (128, 16), (128,)),
    ),
}  # fmt: skip


def inputs(shapes: Shapes) -> list[Tensor]:
    return [normal(*shape, seed=number) for number, shape in enumerate(shapes)]


REGISTERED = set(re.findall(r'"(\w+)\(', (ROOT / "csrc/registration.cpp").read_text()))


def test_every_registered_operation_has_a_case() -> None:
    assert set(CASES) == {name for name in REGISTERED if not name.endswith("_backward")}


def found(name: str, leaves: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Results and gradients."""
    results = CASES[name][0](*leaves)
    results = list(results) if isinstance(results, tuple) else [results]
    return results, torch.autograd.grad([o.float().square().sum() for o in results if o.requires_grad], leaves)


class Calls(TorchDispatchMode):
    """The calls of native operations, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megabert":
            self.made.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_torch_knows_the_operation(name: str) -> None:
    """Schemas, shapes for tracing and gradients by torch.library.opcheck, of the forward and of the backward operation."""
    leaves = [t.float().requires_grad_() for t in inputs(CASES[name][1])]
    with Calls() as calls:
        found(name, leaves)
    called = {func._schema.name.partition("::")[2] for func, _ in calls.made}
    assert called == {name, f"{name}_backward"} & REGISTERED
    addresses = {leaf.data_ptr() for leaf in leaves}
    for func, args in calls.made:
        backward = func._schema.name.endswith("_backward")
        copies = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
        for copy, a in zip(copies, args, strict=True):
            if not backward and isinstance(a, Tensor) and a.data_ptr() in addresses:
                copy.requires_grad_()
        checks = ("test_schema", "test_faketensor") if backward else torch.library._OPCHECK_DEFAULT_UTILS
        torch.library.opcheck(func, tuple(copies), test_utils=checks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("two_threads")
def test_threads_and_strides_change_no_bit(name: str) -> None:
    runs = []
    for threads, strided in ((1, False), (2, False), (2, True)):
        torch.set_num_threads(threads)
        leaves = [t.bfloat16() for t in inputs(CASES[name][2])]
        leaves = [(torch.stack([t, t], -1)[..., 1] if strided else t).requires_grad_() for t in leaves]
        results, gradients = found(name, leaves)
        runs.append([*results, *gradients])
    for other in runs[1:]:
        assert all(a.equal(b) for a, b in zip(runs[0], other, strict=True))


INTS, ones = torch.zeros(2, 3, dtype=torch.int32), torch.ones
DROP: dict[str, Any] = {"seed": SEED, "stream": 0, "p": 0.1}
RANGES = {"key_start": torch.zeros(1, 4).int(), "key_end": torch.full((1, 4), 4).int()}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "attention": {"qkv": ones(1, 4, 24), "bias": None, "heads": 2} | RANGES | DROP,
    "dropout_add_layer_norm": {"x": ones(2, 8), "bias": ones(8), "residual": ones(2, 8), "eps": 1e-5} | DROP
    | {"weight": ones(8), "shift": ones(8)},
    "bias_geglu": {"x": ones(2, 4), "bias": ones(4)},
    "bias_geglu_backward": {"grad": ones(2, 2), "x": ones(2, 4), "bias": ones(4)},
    "rotate": {"qkv": ones(2, 12), "cos": ones(2, 1), "sin": ones(2, 1), "heads": 2, "back": False},
    "mlm_loss": {"hidden": ones(2, 8), "weight": ones(32, 8), "bias": ones(32), "labels": torch.tensor([0, 1])}
    | {"vocab_size": 20, "need_grad": True},
    "softmax_mask": {"scores": ones(2, 2, 3, 4), "scale": 1.0} | dict.fromkeys(("key_start", "key_end", "mask")) | DROP,
}  # fmt: skip
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("attention", {"qkv": ones(1, 4, 24).double()}, "qkv has dtype"),
    ("attention", {"heads": 5}, "not a multiple of 3 x 5 heads"),
    ("attention", {"key_end": torch.full((1, 4), 5).int()}, r"outside \[0, 4\]"),
    ("attention", {"key_end": ones(1, 3).int()}, "key_end has size 3"),
    ("dropout_add_layer_norm", {"x": ones(2, 8).half()}, "x has dtype"),
    ("dropout_add_layer_norm", {"bias": ones(7)}, "bias has size 7 in dimension 0, not 8"),
    ("dropout_add_layer_norm", {"residual": ones(3, 8)}, "residual has another shape"),
    ("dropout_add_layer_norm", {"seed": ones(3).long()}, "seed has 3 elements, not 1 or 2"),
    ("dropout_add_layer_norm", {"p": 1.0}, r"p is 1, not in \[0, 1\)"),
    ("bias_geglu", {"x": ones(2, 3), "bias": ones(3)}, "x has 3 columns, which are no two halves"),
    ("bias_geglu_backward", {"grad": ones(2, 4)}, "grad is not half of x in its last dimension"),
    ("rotate", {"qkv": ones(2, 13)}, "qkv has 13 columns"),
    ("rotate", {"sin": ones(3, 1)}, "sin has 3 elements, not 1 a token"),
    ("mlm_loss", {"labels": torch.tensor([0, 20])}, r"labels\[1\] is 20"),
    ("mlm_loss", {"weight": ones(32, 7)}, "weight has size 7 in dimension 1, not 8"),
    ("mlm_loss", {"vocab_size": 33}, "vocab_size is 33"),
    ("softmax_mask", {"key_end": INTS + 5}, r"key_end\[0, 0\] is 5, outside \[0, 4\]"),
    ("softmax_mask", {"key_end": INTS[:, :1] - 1}, r"key_end\[0, 0\] is -1, outside \[0, 4\]"),
    ("softmax_mask", {"key_start": torch.zeros(3, 3).int()}, "key_start has size 3 in dimension 0"),
    ("softmax_mask", {"mask": ones(2, 2, 3, 4).int()}, "mask has dtype"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[f"{name}: {message}" for name, _, message in WRONG])
def test_wrong_arguments_are_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.megabert, name)(**(ARGUMENTS[name] | change))

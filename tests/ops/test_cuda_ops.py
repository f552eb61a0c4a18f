"""What CUDA operations do beyond the tests of their numerics, which run on a GPU by their `cuda` cases, and copies to the device."""

import pytest
import torch
import torch.nn.functional as F

from megabert import ops
from megabert.data.batch import BatchLayout, Update
from tests.ops import reference
from tests.ops.oracle import compare, normal, results

pytestmark = pytest.mark.gpu
SEED, STREAM = 0xFEED5, 3


def test_mlm_loss_of_several_chunks() -> None:
    """More logits than a chunk has (csrc/mlm_loss/cuda.cu), with fp64 on the GPU too."""
    vocab, entries = 30_522, 30_592
    labels = torch.randint(0, vocab, (10_000,), generator=torch.Generator().manual_seed(1)).cuda()
    labels[1::4] = -100
    inputs = [normal(10_000, 64, seed=2), normal(entries, 64, seed=3, scale=0.3), normal(entries, seed=4)]
    inputs = [t.to("cuda", torch.bfloat16) for t in inputs]
    grads = [torch.tensor(0.37)]
    ours = results(lambda h, w, b: [ops.mlm_loss(h, w, b, labels, vocab, "native")[0]], inputs, grads)
    plain = results(lambda h, w, b: [ops.mlm_loss(h, w, b, labels, vocab, "torch")[0]], inputs, grads)
    inputs = [t.double() for t in inputs]
    exact = results(lambda h, w, b: [reference.mlm_loss(h, w, b, labels, vocab)[0]], inputs, grads)
    compare(ours, plain, exact, torch.bfloat16)


def test_mlm_gradients_are_scaled_in_fp32() -> None:
    """By the share of an update, a scalar of the device, not by its value in bf16."""
    labels, factor = torch.arange(64).cuda(), torch.tensor(1 / 1300.7).cuda()
    inputs = [normal(64, 64, seed=2), normal(128, 64, seed=3), normal(128, seed=4)]
    leaves = [t.to("cuda", torch.bfloat16).requires_grad_() for t in inputs]
    whole, scaled = (
        torch.autograd.grad(ops.mlm_loss(*leaves, labels, 100, "native")[0], leaves, grad)
        for grad in (torch.ones_like(factor), factor)
    )
    for one, other in zip(whole, scaled, strict=True):
        assert torch.equal((one.float() * factor).bfloat16(), other)


@pytest.mark.parametrize("backend", ["varlen", "sdpa", "native"])
def test_attention_of_512_tokens_repeats_bit_for_bit(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one block of keys, where torch's flash attention adds up dq atomically unless asked not to."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    qkv, grad = (normal(8, 512, n * 256, seed=s).bfloat16().cuda() for n, s in ((3, 1), (1, 2)))
    start, end = (torch.full((8, 512), n, dtype=torch.int32, device="cuda") for n in (0, 512))
    inputs, p = ops.attention_inputs(backend, start, end, end[:, :1]), 0.1 if backend == "native" else 0.0
    seed, leaf = torch.tensor([SEED], device="cuda"), qkv.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        outputs = [ops.attend(leaf, 4, inputs, p, seed, STREAM, backend) for _ in range(20)]
        found = [torch.autograd.grad(out, leaf, grad)[0] for out in outputs]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(again.equal(found[0]) for again in found)


def test_kernels_run_on_the_current_stream() -> None:
    """What follows on it sees their result."""
    x, bias = torch.randn(4096, 4096, device="cuda"), torch.zeros(4096, device="cuda")
    expected = F.gelu(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = ops.bias_gelu(x * 2, bias, "native")
        difference = (found - F.gelu(x * 2)).abs().max()
    stream.synchronize()
    assert difference < 1e-5 and not found.equal(expected)


def test_mixed_devices_and_head_sizes_are_named() -> None:
    arguments = (torch.ones(2, 4), torch.ones(4))
    for moved in (0, 1):
        mixed = [a.cuda() if i == moved else a for i, a in enumerate(arguments)]
        with pytest.raises(RuntimeError, match=r"(bias|x) is not on (the CPU|a CUDA device)"):
            torch.ops.megabert.bias_gelu(*mixed)
    bound, seed = torch.zeros(1, 4, dtype=torch.int32, device="cuda"), torch.tensor([SEED], device="cuda")
    with pytest.raises(RuntimeError, match="heads have size 128, not a multiple of 8 up to 64"):
        torch.ops.megabert.attention(torch.ones(1, 4, 384).bfloat16().cuda(), None, bound, bound, seed, 0, 1, 0.0)


def test_pinned_buffers_are_reused_after_their_copies() -> None:
    """The host makes updates ahead and frees them while the device has not copied any."""
    layout = BatchLayout(rows=64, seq_len=512, max_sequences=4, capacity=80)

    def on_device(value: int) -> list[torch.Tensor]:
        types = zip(layout.sizes(), (torch.int32, torch.int64), strict=True)
        narrow, wide = (torch.full((size,), value, dtype=dtype).pin_memory() for size, dtype in types)
        batches = layout.micro_batches(narrow, wide, 32)
        update = Update(step=0, epoch=0, batches=batches, buffers=(layout, narrow, wide))
        return [tensor for batch in update.on("cuda") for tensor in (batch.input_ids, batch.mlm_labels, batch.lengths)]

    torch.cuda._sleep(200_000_000)
    found = [on_device(value) for value in (1, 2, 3)]
    for value, tensors in enumerate(found, 1):
        for ids, labels, lengths in (tensors[:3], tensors[3:]):
            assert (ids == value).all() and (labels == value).all()
            assert (lengths == value).sum() == 32 * 4 and lengths.sum() == 32 * 512

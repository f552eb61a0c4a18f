"""Packed weights and threads of their own change nothing but speed."""

import numpy as np
import pytest
import torch

from megabert import ops
from megabert.config import ModelConfig, OpsConfig
from megabert.hf.inference import can_pack, one_row, pack_weights
from megabert.hf.packing import pack, pack_line
from megabert.model import BertForPreTraining
from tests.helpers import runs

CPU = torch.device("cpu")


def model(dtype: torch.dtype = torch.float32, **backends: str) -> BertForPreTraining:
    cfg = ModelConfig(layers=2, hidden=48, heads=3, vocab_size=60, max_positions=40)
    return runs.model(cfg, ops=OpsConfig(**backends)).to(dtype)


def sequences() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(5, 60, length).astype(np.int32) for length in (1, 40, 7, 3, 16)]


def test_native_attention_on_the_cpu_takes_one_row() -> None:
    native = model(attention="native")
    assert one_row(native) and not one_row(model(attention="sdpa"))
    assert not one_row(native.to("meta"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
@torch.no_grad()
def test_packed_weights_give_the_same(dtype: torch.dtype, tolerance: float) -> None:
    if not can_pack("cpu", dtype):
        pytest.skip(f"this machine packs no {dtype}")
    plain, packed = model(), model(dtype)
    assert pack_weights(packed)
    for layer in packed.layers:
        layer.qkv.weight.zero_()  # read no more
    inputs = pack(sequences(), [40] * 5).inputs()
    want, found = plain.encode(**inputs), packed.encode(**inputs).float()
    real = inputs["key_end"] > inputs["key_start"]
    assert (want - found)[real].abs().max() < tolerance < want[real].std()


@torch.no_grad()
def test_a_line_holds_the_same_sequences_as_rows() -> None:
    built, given, seconds = model(), sequences(), [1, 20, 7, 2, 5]
    rows, line = pack(given, seconds), pack_line(given, seconds)
    assert line.input_ids.shape == (1, 67) and line.lengths.tolist() == [[1, 40, 7, 3, 16]]
    one, other = (built.encode(**packed.inputs()).flatten(0, 1) for packed in (rows, line))
    for ids, a, b in zip(given, rows.starts, line.starts, strict=True):
        assert (one[a : a + len(ids)] - other[b : b + len(ids)]).abs().max() < 1e-5
    causal = pack_line(given, seconds, causal=True)
    assert causal.key_end[0, 1:5].tolist() == [2, 3, 4, 5] and causal.key_start[0, 1:5].tolist() == [1] * 4
    with pytest.raises(ValueError, match="empty"):
        pack_line([np.zeros(0, np.int32)], [0])


@torch.no_grad()
def test_unread_positions_are_not_attended_from() -> None:
    built = model()
    if built.backends.attention.name != "native":
        pytest.skip(ops.MISSING)
    packed = pack(sequences(), [40] * 5)
    keep = torch.from_numpy(packed.starts)
    inputs = packed.inputs()
    bounds = ops.attention_inputs("native", packed.key_start, packed.key_end, packed.lengths)
    qkv, seed = torch.randn(*packed.input_ids.shape, 144), torch.zeros(1, dtype=torch.int64)
    narrow = ops.only_queries("native", bounds, keep)
    every, few = (ops.attend(qkv, 3, b, 0.0, seed, 0, "native").flatten(0, 1) for b in (bounds, narrow))
    assert torch.equal(every[keep], few[keep])
    assert few.abs().sum(-1).nonzero().flatten().tolist() == sorted(keep.tolist())
    assert torch.allclose(built.encode(**inputs, keep=keep), built.encode(**inputs).flatten(0, 1)[keep], atol=1e-5)

"""The model against Hugging Face's BERT, packing against alone, backends against each other, and what must cost nothing."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig
from transformers import BertForPreTraining as HuggingFace

from megabert import ops
from megabert.config import ModelConfig, OpsConfig
from megabert.data.batch import BatchLayout, collate
from megabert.data.masking import Masked
from megabert.data.shards import Rows
from megabert.hf.mapping import from_huggingface
from megabert.model import BertForPreTraining, Output, parameter_count
from megabert.ops import rotation
from megabert.ops.rotary import rotate

VOCAB = 1000  # padded to 1,024
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "layers": 3, "hidden": 64, "heads": 4, "max_positions": 64}
PLAIN = OpsConfig(attention="sdpa", mlm_loss="torch", layer="torch")
NATIVE = OpsConfig(attention="native", mlm_loss="native", layer="native")
FUSED_SOFTMAX = OpsConfig(attention="fused_softmax", mlm_loss="torch", layer="native")
needs_library = pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
KIND = {
    "post": {"norm": "post"}, "pre": {"norm": "pre"}, "modern": {"kind": "modern", "norm": "pre", "nsp": False},
    "nomic": {"kind": "nomic", "nsp": False, "activation": "silu"},
}  # fmt: skip
KINDS = pytest.mark.parametrize("fields", KIND.values(), ids=KIND)
native = pytest.param(NATIVE, id="native", marks=needs_library)
fused_softmax = pytest.param(FUSED_SOFTMAX, id="fused_softmax", marks=needs_library)
backends = pytest.mark.parametrize("choice", [pytest.param(PLAIN, id="torch"), native, fused_softmax])


def model(choice: OpsConfig = PLAIN, seed: int = 0, **changes: Any) -> BertForPreTraining:
    torch.manual_seed(seed)
    built = BertForPreTraining(ModelConfig(**(SMALL | changes)), choice, dtype=torch.float32)
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a wrong use of them
        for name, p in built.named_parameters():
            if p.dim() == 1 and name != "embeddings.word.bias":
                p.add_(torch.randn_like(p) * 0.2)
    return built


def batch(rows: list[list[int]], width: int, seed: int = 1, slots: int = 6) -> dict[str, Tensor]:
    """Rows that hold sequences of these lengths; two thirds of the prediction slots of each row are used."""
    draw, layout = np.random.default_rng(seed), BatchLayout(len(rows), width, max(map(len, rows)), slots)
    ids, bounds = np.zeros((layout.rows, width), np.int32), np.zeros((layout.rows, layout.max_sequences, 2), np.uint16)
    places, labels = np.zeros((layout.rows, slots), np.int32), np.full((layout.rows, slots), -100)
    for b, row in enumerate(rows):
        used = min(slots * 2 // 3, sum(row))
        ids[b, : sum(row)] = draw.integers(5, VOCAB, sum(row))
        bounds[b, : len(row)] = [(length, length // 2) for length in row]
        places[b, :used] = np.sort(draw.permutation(sum(row))[:used])
        labels[b, :used] = draw.integers(5, VOCAB, used)
    made, numbers = Rows(ids, bounds, draw.integers(0, 2, bounds.shape[:2])), np.arange(layout.rows)
    buffers = layout.empty()
    collate(made, Masked(ids, places, labels, (labels >= 0).sum(1)), numbers, numbers * width, layout.views(*buffers))
    (batch,) = layout.micro_batches(*map(torch.from_numpy, buffers), layout.rows)
    return batch.inputs()


def encoder_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    names = ("input_ids", "segment_ids", "position_ids", "key_start", "key_end", "lengths")
    return {name: inputs[name] for name in names}


@backends
@pytest.mark.parametrize("lengths", [[[32], [32]], [[32], [17], [1]]], ids=["full", "padded"])
def test_equals_hugging_face(lengths: list[list[int]], choice: OpsConfig) -> None:
    """MLM and NSP logits and the losses, for the same weights, one sequence a row, to 1e-4 in fp32."""
    torch.manual_seed(3)
    peer = HuggingFace(
        BertConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
                   max_position_embeddings=64, initializer_range=0.2)
    ).eval()  # fmt: skip
    with torch.no_grad():
        for p in peer.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
    ours = model(choice).eval()
    ours.load_state_dict(from_huggingface(peer.state_dict(), ours.cfg))
    inputs = batch(lengths, 32)
    real = inputs["key_end"] > 0
    labels = torch.full((len(lengths) * 32,), -100)
    used = inputs["mlm_labels"] >= 0
    labels[inputs["mlm_positions"][used].long()] = inputs["mlm_labels"][used]
    theirs = peer(
        input_ids=inputs["input_ids"].long(), token_type_ids=inputs["segment_ids"].long(), attention_mask=real.long(),
        labels=labels.view(-1, 32), next_sentence_label=inputs["nsp_labels"][:, 0],
    )  # fmt: skip
    hidden = ours.encode(**encoder_inputs(inputs))
    assert (ours.mlm_logits(hidden[real]) - theirs.prediction_logits[real]).abs().max() < 1e-4
    assert (ours.nsp_logits(hidden[:, 0]) - theirs.seq_relationship_logits).abs().max() < 1e-4
    assert theirs.prediction_logits.std() > 1  # weights large enough to show a difference
    out = ours(**inputs)
    mean = out.mlm_loss_sum / used.sum() + out.nsp_loss_sum / len(lengths)
    assert abs(mean.item() - theirs.loss.item()) < 1e-4


@backends
@KINDS
def test_packed_sequences_have_the_outputs_of_single_ones(fields: dict[str, Any], choice: OpsConfig) -> None:
    built = model(choice, **fields).eval()
    inputs = batch([[9, 20, 1], [32], [16, 15]], 32)
    packed = built.encode(**encoder_inputs(inputs))
    keep = torch.cat([inputs["mlm_positions"].flatten(), inputs["cls_positions"].flatten()])
    kept = built.encode(**encoder_inputs(inputs), keep=keep)  # the last layer computes only positions that are read
    torch.testing.assert_close(kept, packed.flatten(0, 1)[keep.long()], rtol=0, atol=1e-5)
    for b, at, length in ((0, 0, 9), (0, 9, 20), (0, 29, 1), (1, 0, 32), (2, 0, 16), (2, 16, 15)):
        alone = batch([[length]], length)
        for name in ("input_ids", "segment_ids"):
            alone[name] = inputs[name][b : b + 1, at : at + length]
        hidden = built.encode(**encoder_inputs(alone))
        assert (hidden[0] - packed[b, at : at + length]).abs().max() < 1e-5
    assert torch.isfinite(packed).all()


def gradients(built: BertForPreTraining, inputs: dict[str, Tensor], seed: int = 5) -> tuple[Output, dict[str, Tensor]]:
    built.zero_grad()
    torch.manual_seed(seed)
    out = built(**inputs)
    (out.mlm_loss_sum / 8 + out.nsp_loss_sum / 3).backward()
    found = {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}
    assert found.keys() == dict(built.named_parameters()).keys()
    return out, found


@pytest.mark.parametrize("choice", [native, fused_softmax])
@KINDS
def test_backends_give_the_same_losses_and_gradients(fields: dict[str, Any], choice: OpsConfig) -> None:
    changes: dict[str, Any] = fields | {"dropout": 0.0, "attention_dropout": 0.0}
    inputs = batch([[9, 20, 1], [32], [16]], 32)
    (plain, grads), (ours, own) = (gradients(model(each, **changes), inputs) for each in (PLAIN, choice))
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    for name, grad in grads.items():
        assert (own[name] - grad).abs().max() < 1e-4 * grad.abs().max().clamp(min=1e-3), name


@needs_library
@pytest.mark.parametrize("recompute", [False, True])
def test_attention_gives_the_gradient_of_its_bias(recompute: bool) -> None:
    """It is that of a sum over qkv's gradient, and nothing else changes a bit."""
    inputs, found = batch([[9, 20, 1], [32], [16]], 32), []
    for alone in (False, True):
        built = model(NATIVE, activation_checkpointing=recompute).train()
        for layer in built.layers:
            layer.qkv.sums_bias &= alone
        found.append(gradients(built, inputs)[1])
    summed, given = found
    for name, grad in given.items():
        if name.endswith(".qkv.bias"):
            largest = summed[name].abs().max()
            assert (grad - summed[name]).abs().max() < 1e-5 * largest and largest > 1e-4, name
        else:
            assert grad.equal(summed[name]), name


@backends
@KINDS
def test_recomputation_replays_dropout(fields: dict[str, Any], choice: OpsConfig) -> None:
    """Activation checkpointing changes neither loss nor gradients, bit for bit, with dropout on."""
    inputs = batch([[9, 20, 1], [32]], 32)
    plain, grads = gradients(model(choice, **fields).train(), inputs)
    again, regrads = gradients(model(choice, **fields, activation_checkpointing=True).train(), inputs)
    assert all(a.equal(b) for a, b in zip(plain, again, strict=True))
    assert all(grads[name].equal(regrads[name]) for name in grads)
    other, _ = gradients(model(choice, **fields).train(), inputs, seed=6)
    assert other.mlm_loss_sum != plain.mlm_loss_sum  # dropout is on and follows the seed


@pytest.mark.parametrize("fields", [{"norm": "pre"}, KIND["modern"] | {"embedding_norm": False}], ids=["pre", "modern"])
def test_the_first_norm_is_of_embeddings_behind_dropout(fields: dict[str, Any]) -> None:
    """Where it is the first layer's."""
    built = model(**fields, dropout=0.5).train()
    ids = torch.arange(5, 37)[None].int()
    normed, x = built.embeddings(ids, ids * 0, ids - 5, torch.tensor([7]))
    table = built.embeddings
    assert 0.2 < (x == 0).float().mean() < 0.8
    assert normed.equal(ops.norm(x, table.norm_weight, table.norm_bias, built.cfg.layer_norm_eps, built.cfg.rms_norm))


@backends
def test_unused_slots_and_pads_are_silent(choice: OpsConfig) -> None:
    """What stands in pads, unused slots and unlabelled pairs changes no loss and no gradient."""
    built = model(choice, dropout=0.0, attention_dropout=0.0)
    inputs = batch([[9, 11], [12]], 32)
    out, grads = gradients(built, inputs)
    changed = {name: t.clone() for name, t in inputs.items()}
    pads, unused, empty = inputs["key_end"] == 0, inputs["mlm_labels"] < 0, inputs["lengths"] == 0
    changed["input_ids"][pads] = 77
    changed["mlm_positions"][unused] = 3
    changed["cls_positions"][empty] = 5
    again, regrads = gradients(built, changed)
    assert all(a.equal(b) for a, b in zip(out, again, strict=True))
    for name, grad in grads.items():
        torch.testing.assert_close(regrads[name], grad, rtol=0, atol=2e-6)
    part = built(**inputs | {"nsp_labels": torch.cat([torch.full((1, 2), -100), inputs["nsp_labels"][1:]])})
    single = {name: t[1:].clone() for name, t in inputs.items()}
    for name in ("mlm_positions", "cls_positions"):
        single[name] -= 32
    assert abs(part.nsp_loss_sum - built(**single).nsp_loss_sum) < 1e-5
    nothing = {name: torch.full_like(t, -100) if "labels" in name else t for name, t in inputs.items()}
    zero, silent = gradients(built, nothing)
    assert [v.item() for v in zero] == [0, 0, 0, 0]
    assert all(grad.abs().max() == 0 for grad in silent.values())


@backends
def test_counts_of_correct_predictions(choice: OpsConfig) -> None:
    built, inputs = model(choice).eval(), batch([[30], [12, 20]], 32)
    hidden = built.encode(**encoder_inputs(inputs)).flatten(0, 1)
    inputs["mlm_labels"][0, :3] = built.mlm_logits(hidden[inputs["mlm_positions"][0, :3].long()]).argmax(-1)
    predicted = built.nsp_logits(hidden[inputs["cls_positions"].flatten().long()]).argmax(-1).view(2, 2)
    inputs["nsp_labels"] = torch.where(inputs["lengths"] > 0, predicted, -100)
    out = built(**inputs)
    assert int(out.nsp_correct) == 3
    assert 3 <= int(out.mlm_correct) <= 4


def test_model_without_nsp() -> None:
    built, inputs = model(nsp=False), batch([[30]], 32)
    assert not any("nsp" in name or "pooler" in name for name, _ in built.named_parameters())
    out, _ = gradients(built, inputs)
    assert out.nsp_loss_sum == 0 and out.nsp_correct == 0 and out.mlm_loss_sum > 0
    counts = SimpleNamespace(predictions=4, nsp_pairs=1, sources=None)  # the data may have pairs all the same
    assert built.counts(counts) == (4, 0) and model().counts(counts) == (4, 1)


def test_parameter_counts() -> None:
    """LARGE with 30,528 entries has 336.2 M parameters; BASE with the published 30,522 has Hugging Face's number."""
    large = ModelConfig(layers=24, hidden=1024, heads=16, vocab_size=30_528)
    assert round(parameter_count(large) / 1e6, 1) == 336.2
    with torch.device("meta"):
        published = sum(p.numel() for p in HuggingFace(BertConfig()).parameters())
    for norm in ("post", "pre"):
        assert parameter_count(ModelConfig(vocab_size=30_522, norm=norm)) == published


def test_initialisation() -> None:
    torch.manual_seed(0)
    built = BertForPreTraining(ModelConfig(**SMALL), PLAIN)
    weight = built.layers[0].feed_forward.weight
    assert weight.abs().max() <= 0.04 and abs(weight.std().item() - 0.02 * 0.88) < 5e-4  # cut at two deviations
    assert built.embeddings.word.weight.shape == (1024, 64) and built.embeddings.word.weight[VOCAB:].abs().max() == 0
    for name, p in built.named_parameters():
        if p.dim() == 1:
            assert (p == (1 if name.endswith("norm_weight") else 0)).all(), name


def losses(choice: OpsConfig) -> list[float]:
    """Of twenty steps in bf16."""
    built = model(choice, dropout=0.0, attention_dropout=0.0).bfloat16()
    optimizer = torch.optim.AdamW(built.parameters(), lr=2e-3)
    found = []
    for step in range(20):
        out = built(**batch([[30], [12, 20], [7, 7, 7]], 32, seed=step % 4))
        loss = out.mlm_loss_sum / 12 + out.nsp_loss_sum / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("choice", [native, pytest.param(FUSED_SOFTMAX, marks=[needs_library, pytest.mark.slow])])
def test_twenty_bf16_steps_repeat_bit_for_bit(choice: OpsConfig) -> None:
    ours, plain = losses(choice), losses(PLAIN)
    assert ours == losses(choice)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=3e-2, atol=3e-2)
    assert plain[-1] < 0.8 * plain[0]


@pytest.mark.parametrize("choice", [pytest.param(PLAIN, id="torch"), native])
@KINDS
def test_compiles(fields: dict[str, Any], choice: OpsConfig) -> None:
    changes: dict[str, Any] = fields | {"layers": 2, "dropout": 0.0, "attention_dropout": 0.0}
    built, inputs = model(choice, **changes), batch([[30], [12, 20]], 32)
    torch.compiler.reset()  # one function may be compiled eight times
    compiled = torch.compile(built, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs), built(**inputs), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_layers_above_the_wanted_states_are_not_run() -> None:
    """The last state is what `encode` gives."""
    built, inputs, ran = model().eval(), encoder_inputs(batch([[32], [17], [9, 20]], 32)), []
    states = built.hidden_states(**inputs)
    assert len(states) == built.cfg.layers + 1 and states[-1].equal(built.encode(**inputs))
    for index, layer in enumerate(built.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    for count in range(1, len(states) + 1):
        ran.clear()
        first = built.hidden_states(**inputs, count=count)
        assert ran == list(range(count - 1)) and len(first) == count
        assert all(got.equal(state) for got, state in zip(first, states[:count], strict=True))


def test_a_model_without_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.vocab_size=0: set it to the tokenizer's vocabulary size"):
        BertForPreTraining(ModelConfig(**(SMALL | {"vocab_size": 0})))


@torch.no_grad()
def test_layers_that_start_at_zero_change_nothing() -> None:
    def fresh(**changes: Any) -> BertForPreTraining:
        torch.manual_seed(0)
        return BertForPreTraining(ModelConfig(**SMALL, norm="pre", **changes), PLAIN, dtype=torch.float32).eval()

    plain, zero = fresh(), fresh(zero_init=True)
    outputs = ("attention_output.weight", "feed_forward_output.weight")
    for (name, p), (_, other) in zip(zero.named_parameters(), plain.named_parameters(), strict=True):
        assert p.equal(torch.zeros_like(p) if name.endswith(outputs) else other), name
    states = zero.hidden_states(**encoder_inputs(batch([[30], [12, 20]], 32)))
    assert all(state.equal(states[0]) for state in states[1:-1])  # the residual stream; the last one is normed


@torch.no_grad()
@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "theta"), [(128, 2, 0, 10_000.0), (192, 3, 1, 160_000.0), (768, 12, 0, 10_000.0)]
)
def test_two_heads_start_at_the_neighbours(hidden: int, heads: int, kv_heads: int, theta: float) -> None:
    shape = {"kind": "modern", "norm": "pre", "nsp": False, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    start = {"layers": 2, "vocab_size": VOCAB, "rope_theta": theta, "neighbour_heads": True}
    layers = BertForPreTraining(ModelConfig(**shape, **start), PLAIN, dtype=torch.float32).layers
    places, size = torch.arange(32), hidden // heads
    for layer in layers:
        qkv, _ = layer.qkv(torch.zeros(1, 32, hidden))
        turned = rotate(qkv, heads, rotation(places[None], size, theta), "torch").view(32, 3, heads, size)
        attention = torch.einsum("ihd,jhd->hij", turned[:, 0], turned[:, 1]).div(size**0.5).softmax(-1)
        before, after = attention[0].diagonal(-1), attention[1].diagonal(1)
        assert before.min() > 0.5 and after.min() > 0.5
        assert all(attention[0].argmax(-1)[1:] == places[:-1]) and all(attention[1].argmax(-1)[:-1] == places[1:])
        assert not layer.qkv.bias[2 * size : hidden].any()  # the queries of other heads


@backends
def test_an_untied_decoder_gets_the_loss_gradient(choice: OpsConfig) -> None:
    built = model(choice, tied=False, dropout=0.0, attention_dropout=0.0)
    inputs = batch([[30], [12, 20]], 32)
    _, grads = gradients(built, inputs)
    decoder, embedding = grads["embeddings.word.decoder"], grads["embeddings.word.weight"]
    seen = torch.isin(torch.arange(1024), inputs["input_ids"])
    assert embedding[~seen].abs().max() == 0 and embedding[seen].abs().max() > 0
    assert decoder[:VOCAB].abs().min(1).values.max() > 0 and decoder[VOCAB:].abs().max() == 0
    assert built.embeddings.word.decoder[VOCAB:].abs().max() == 0
    assert parameter_count(built.cfg) == parameter_count(model().cfg) + VOCAB * 64
    logits = built.mlm_logits(torch.randn(5, 64))
    with torch.no_grad():
        built.embeddings.word.weight.zero_()
    assert logits.shape == (5, VOCAB) and logits.abs().max() > 0


@torch.no_grad()
def test_a_bias_of_log_frequencies_predicts_them() -> None:
    built, counts, nothing = model(), torch.arange(VOCAB), torch.zeros(1, 64)
    built.init_decoder_bias(counts)
    shares = built.mlm_logits(nothing) - built.mlm(nothing) @ built.embeddings.word.weight[:VOCAB].T
    torch.testing.assert_close(shares.softmax(-1)[0], (counts + 1) / (counts + 1).sum(), rtol=1e-4, atol=1e-7)
    assert built.embeddings.word.bias[VOCAB:].abs().max() == 0

"""Published architectures: transformers' own logits and gradients, the same tensors back; NomicBERT's first files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megabert import ops
from megabert.commands import convert, export
from megabert.config import Config, OpsConfig
from megabert.hf import mapping, read
from megabert.hf.packing import pack
from megabert.model import BertForPreTraining, unpacked_inputs
from tests.helpers import runs, tiny, wordpiece
from tests.helpers.ranks import run_ranks

# fields of published config.json files, from the pages of these models on huggingface.co
# answerdotai/ModernBERT-base and -large (Warner et al. 2024)
MODERN: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "cls_token_id": 50281,
    "decoder_bias": True, "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0, "hidden_activation": "gelu", "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 1152, "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
    "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05,
    "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283, "sep_token_id": 50282,
    "vocab_size": 50368,
}  # fmt: skip
# FacebookAI/roberta-base (Liu et al. 2019)
ROBERTA: dict[str, Any] = {
    "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "roberta",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 50265,
}  # fmt: skip
# EuroBERT/EuroBERT-610m (Boizard et al. 2025)
EURO: dict[str, Any] = {
    "architectures": ["EuroBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 4096, "mask_token_id": 128002, "max_position_embeddings": 8192,
    "mlp_bias": False, "model_type": "eurobert", "num_attention_heads": 18, "num_hidden_layers": 26,
    "num_key_value_heads": 6, "pad_token_id": 128001, "rms_norm_eps": 1e-05, "rope_theta": 250000,
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
# nomic-ai/nomic-embed-text-v1.5 (Nussbaum et al. 2024), as in the defaults of transformers' NomicBertConfig
NOMIC: dict[str, Any] = {
    "architectures": ["NomicBertForMaskedLM"], "attention_probs_dropout_prob": 0.0, "hidden_act": "silu",
    "hidden_dropout_prob": 0.0, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 2048, "model_type": "nomic_bert", "num_attention_heads": 12,
    "num_hidden_layers": 12, "pad_token_id": 0, "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    "type_vocab_size": 2, "vocab_size": 30528,
}  # fmt: skip
CONFIGS = {
    "modernbert-base": MODERN,
    "modernbert-large": MODERN
    | {"hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16, "num_hidden_layers": 28},
    "roberta-base": ROBERTA,
    # FacebookAI/xlm-roberta-base (Conneau et al. 2020), almanach/camembert-base (Martin et al. 2020)
    "xlm-roberta-base": ROBERTA
    | {"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta", "vocab_size": 250002},
    "camembert-base": ROBERTA
    | {"architectures": ["CamembertForMaskedLM"], "bos_token_id": 5, "eos_token_id": 6}
    | {"model_type": "camembert", "vocab_size": 32005},
    "eurobert-210m": EURO
    | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    | {"num_key_value_heads": 12},
    "eurobert-610m": EURO,
    "nomic-embed-text": NOMIC,
}
# The same architectures, small: 4 layers, where there is a window both kinds of layers and rows longer than it.
SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_hidden_layers": 4,
    "max_position_embeddings": 66, "initializer_range": 0.1,
}  # fmt: skip


def shrunk(name: str) -> dict[str, Any]:
    """A published config with the sizes of SIZES; what has none of a field gets none."""
    changes = SIZES | {"local_attention": 16, "num_key_value_heads": 2, "vocab_size": 150}
    changes |= {"bos_token_id": 7, "eos_token_id": 8, "cls_token_id": 7, "sep_token_id": 8, "mask_token_id": 9}
    changes |= {"pad_token_id": min(CONFIGS[name]["pad_token_id"], 2)}
    return CONFIGS[name] | {field: value for field, value in changes.items() if field in CONFIGS[name]}


NATIVE = OpsConfig(attention="native", mlm_loss="native", layer="native")
needs_native = pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
BACKENDS = [pytest.param(runs.PLAIN, id="torch"), pytest.param(NATIVE, id="native", marks=needs_native)]
SMALL = ("modernbert-base", "roberta-base", "xlm-roberta-base", "camembert-base", "eurobert-610m", "nomic-embed-text")
# not from a published file: segments, and Megatron's order of norms
BERTS = {
    kind: shrunk("roberta-base") | {"architectures": [name], "model_type": kind, "type_vocab_size": 2}
    for kind, name in (("bert", "BertForMaskedLM"), ("megatron-bert", "MegatronBertForMaskedLM"))
}
# Lengths of sequences, and the width of their rows: full, padded and packed ones. The windows of the small models are 16 tokens.
ROWS = [([64, 64], 64), ([40, 17], 64), ([5, 33, 1, 12, 50, 2, 25], 64)]
RATE, STEPS = 0.001, 20


def find_peer(tree: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model of a config.json, every parameter random."""
    cls = getattr(transformers, tree["architectures"][0])
    torch.manual_seed(seed)
    peer = cls(cls.config_class.from_dict(tree)).eval()
    for name, parameter in peer.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if name.lower().endswith("norm.weight") else 0.0, 0.1)
    return peer


def largest(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


def compare(tree: dict[str, Any], rows: list[tuple[list[int], int]], choice: OpsConfig) -> None:
    """Logits of every token and the gradients of their mean loss, packed by us, each sequence alone in transformers.

    `rows`: lengths of sequences, and the width.
    """
    peer, draw = find_peer(tree), np.random.default_rng(3)
    model = mapping.from_huggingface_config(tree, "config.json").model_copy(update={"nsp": False})
    ours = BertForPreTraining(model, choice, "cpu", torch.float32).eval()
    ours.load_state_dict(mapping.from_huggingface(revert_weight_conversion(peer, peer.state_dict()), model))
    for lengths, width in rows:
        peer.zero_grad()
        ours.zero_grad()
        texts = [draw.integers(5, 140, length, np.int32) for length in lengths]
        batch = pack(texts, [length // 2 for length in lengths], width)
        logits, wanted, labels = [], [], [torch.from_numpy(draw.integers(5, 140, len(text))) for text in texts]
        hidden = ours.encode(**batch.inputs()).flatten(0, 1)
        for text, start in zip(texts, batch.starts, strict=True):
            logits.append(ours.mlm_logits(hidden[start : start + len(text)]))
            inputs = {"input_ids": torch.from_numpy(text).long()[None]}
            if ours.cfg.segmented:
                inputs["token_type_ids"] = (torch.arange(len(text)) >= len(text) // 2).long()[None]
            wanted.append(peer(**inputs).logits[0])
        found, want = torch.cat(logits), torch.cat(wanted)
        assert largest(found, want) <= 1e-5 and want.std() > 0.05  # so that a difference would show
        for outputs in (found, want):
            F.cross_entropy(outputs, torch.cat(labels)).backward()
        own, gradients = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (ours, peer))
        assert len(gradients) == len(list(peer.parameters()))
        found = mapping.to_huggingface(own, ours.cfg)
        for name, gradient in revert_weight_conversion(peer, gradients).items():
            assert largest(found[name], gradient) <= 1e-5, (lengths, name)


@pytest.mark.parametrize("choice", BACKENDS)
@pytest.mark.parametrize("name", [*SMALL, *BERTS])
def test_logits_and_gradients_are_transformers_own(name: str, choice: OpsConfig) -> None:
    compare(BERTS.get(name) or shrunk(name), ROWS, choice)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "eurobert-610m"])
def test_published_shapes_are_transformers_own(name: str) -> None:
    compare(CONFIGS[name], [([7, 300, 150, 2], 320)], NATIVE)


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_convert_and_export_give_the_same_model(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    tokens = len(wordpiece.write(folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    tree = shrunk(name) | {"vocab_size": tokens, "pad_token_id": 0}
    peer = find_peer(tree)
    peer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(tree))  # as it was published
    convert.convert(folder, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("hf", "back"))
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    assert tree.items() <= json.loads((tmp_path / "back" / "config.json").read_text()).items()
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back").eval()
    text = torch.randint(10, tokens, (2, 60))
    assert type(back) is type(peer) and back(text).logits.equal(peer(text).logits)
    assert back.config.to_dict().get("layer_types") == peer.config.to_dict().get("layer_types")
    if "oberta" in name or "camem" in name:  # their positions follow the padding's id
        (folder / "config.json").write_text(json.dumps(tree | {"pad_token_id": 1}))
        with pytest.raises(ValueError, match=r"model\.first_position=2: in .* it follows the padding's id, 0"):
            convert.convert(folder, tmp_path / "next")


def settings(name: str) -> tuple[dict[str, Any], Config]:
    """A published model, small, as a configuration; where it has a window, that is shorter than the rows."""
    tree = shrunk(name) | {"vocab_size": tiny.VOCAB}
    tree |= {"local_attention": 8} if "local_attention" in tree else {}
    model = mapping.from_huggingface_config(tree, "config.json")
    changes = {f"model__{name}": value for name, value in model.model_dump().items()}
    return tree, tiny.config(**changes, optimizer__weight_decay=0.1, optimizer__lr=RATE)


def our_updates(world: Any, name: str) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Weights, losses of the updates, weights after them."""
    engine = tiny.engine(settings(name)[1], world)
    start = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    losses = [mlm for mlm, _ in tiny.train(engine, range(STEPS), RATE)]
    return start, losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", ["modernbert-base", "nomic-embed-text"])
def test_updates_equal_those_of_a_plain_loop(name: str) -> None:
    """Losses and weights of 20 updates with AdamW, against transformers' model on the same rows."""
    ((start, losses, end),) = run_ranks(1, our_updates, name)
    tree, cfg = settings(name)
    peer, state = find_peer(tree), mapping.to_huggingface(start, cfg.model)
    peer = type(peer).from_pretrained(None, config=peer.config, state_dict=state).train()
    matrices, vectors = ([p for p in peer.parameters() if (p.dim() > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    betas = (cfg.optimizer.beta1, cfg.optimizer.beta2)
    optimizer = torch.optim.AdamW(groups, RATE, betas, cfg.optimizer.eps)
    for step, loss in enumerate(losses):
        batch = tiny.batch(step, range(tiny.ROWS))
        inputs = {"input_ids": batch.input_ids.long()}
        inputs |= {"token_type_ids": batch.segment_ids.long()} if cfg.model.segmented else {}
        logits = peer(**inputs).logits.flatten(0, 1)
        used = batch.mlm_labels >= 0
        mean = F.cross_entropy(logits[batch.mlm_positions[used].long()], batch.mlm_labels[used])
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), cfg.optimizer.clip)
        optimizer.step()
        assert abs(mean.item() - loss) <= 1e-4, step
    theirs = mapping.from_huggingface(revert_weight_conversion(peer, peer.state_dict()), cfg.model)
    assert max(largest(end[name], theirs[name]) for name in theirs) <= 1e-4
    assert losses[0] - losses[-1] > 0.5
    assert max(largest(start[name], theirs[name]) for name in theirs) > 0.01


# nomic-ai/nomic-bert-2048's config.json, small, without the fields of GPT-2 that its code does not read
FIRST: dict[str, Any] = {
    "activation_function": "swiglu", "architectures": ["NomicBertForPreTraining"], "attn_pdrop": 0.0, "causal": False,
    "embd_pdrop": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-12, "max_trained_positions": 66,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 48, "n_head": 6, "n_inner": 80,
    "n_layer": 4, "n_positions": 8192, "pad_vocab_size_multiple": 64, "parallel_block": False, "prenorm": False,
    "qkv_proj_bias": False, "resid_pdrop": 0.0, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": 2, "type_vocab_size": 2,
    "use_rms_norm": False,
}  # fmt: skip


def write_first_nomic(folder: Path, prefix: str, heads: bool) -> tuple[Any, int]:
    """A folder as its own code saves one, of a padded vocabulary; transformers' model of the same weights, and tokens."""
    folder.mkdir()
    tokens = len(wordpiece.write(folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    rows = tokens // 64 * 64 + 64
    peer = find_peer(shrunk("nomic-embed-text") | {"vocab_size": rows, "pad_token_id": 0})
    torch.nn.init.zeros_(peer.cls.predictions.transform.dense.bias)
    torch.nn.init.zeros_(peer.cls.predictions.bias)
    peer.save_pretrained(folder)
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("nomic_bert."):
            weights[prefix + name.removeprefix("nomic_bert.")] = tensor
        elif heads and not name.endswith(("dense.bias", "predictions.bias")):
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIRST | {"vocab_size": rows}))
    return peer, tokens


@torch.no_grad()
def test_nomics_first_form_is_the_present_one(tmp_path: Path, capsys) -> None:
    peer, tokens = write_first_nomic(tmp_path / "hf", "bert.", heads=True)
    found = read.read(tmp_path / "hf")
    assert (found.config.model.vocab_size, found.config.model.max_positions) == (tokens, 66)
    assert not found.initialised and "which have no tokens" in found.ignored[0]
    ids, model = torch.randint(5, tokens, (1, 60)), found.model(torch.device("cpu"))
    hidden, wanted = model.encode(**unpacked_inputs(ids))[0], peer(ids).logits[0, :, :tokens]
    torch.testing.assert_close(model.mlm_logits(hidden)[:, :tokens], wanted, rtol=0, atol=1e-5)
    assert wanted.std() > 0.05
    assert convert.main(["--model", str(tmp_path / "hf"), "--run", str(tmp_path / "run")]) == 0
    assert f"the embeddings of ids {tokens:,} to " in capsys.readouterr().out
    write_first_nomic(tmp_path / "encoder", "", heads=False)
    assert read.read(tmp_path / "encoder").initialised == ("masked-LM head",)


def test_what_nomics_first_form_cannot_be_is_named(tmp_path: Path) -> None:
    write_first_nomic(tmp_path / "hf", "bert.", heads=True)
    file = tmp_path / "hf/config.json"
    tree = json.loads(file.read_text())
    for change, message in (
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction=0.5 is not supported, only 1.0"),
        ({"qkv_proj_bias": True}, "qkv_proj_bias=True is not supported, only False"),
        (
            {"n_positions": 0, "max_trained_positions": 0},
            r"n_positions and max_trained_positions are \[0, 0\]; one must",
        ),
        ({"n_positions": None}, "n_positions must be a number, is None"),
        ({"n_inner": "80"}, "intermediate_size must be a number, is '80'"),
    ):
        file.write_text(json.dumps(tree | change))
        with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
            read.read(tmp_path / "hf")

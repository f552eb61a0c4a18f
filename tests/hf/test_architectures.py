"""Published architectures: transformers' own logits and gradients, and the same tensors back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megabert import ops
from megabert.commands import convert, export
from megabert.config import OpsConfig
from megabert.data.packing import pack
from megabert.hf import mapping
from megabert.model import BertForPreTraining
from tests.helpers import runs, tiny, wordpiece
from tests.helpers.ranks import run_ranks
from tests.hf import published

NATIVE = OpsConfig(attention="native", mlm_loss="native", layer="native")
needs_native = pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
backends = pytest.mark.parametrize(
    "choice", [pytest.param(runs.PLAIN, id="torch"), pytest.param(NATIVE, id="native", marks=needs_native)]
)
SMALL = ("modernbert-base", "roberta-base", "xlm-roberta-base", "camembert-base", "eurobert-610m", "nomic-embed-text")
# Lengths of sequences by row width; the windows of the small models are 16 tokens.
ROWS = {"full": ([64, 64], 64), "padded": ([40, 17], 64), "packed": ([5, 33, 1, 12, 50, 2, 25], 64)}


def find_peer(tree: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model of a config.json, every parameter random."""
    cls = getattr(transformers, tree["architectures"][0])
    torch.manual_seed(seed)
    peer = cls(cls.config_class.from_dict(tree)).eval()
    for name, parameter in peer.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if name.lower().endswith("norm.weight") else 0.0, 0.1)
    return peer


def ours_of(tree: dict[str, Any], peer: Any, choice: OpsConfig) -> BertForPreTraining:
    model = mapping.from_huggingface_config(tree, "config.json").model_copy(update={"nsp": False})
    built = BertForPreTraining(model, choice, "cpu", torch.float32).eval()
    built.load_state_dict(mapping.from_huggingface(revert_weight_conversion(peer, peer.state_dict()), model))
    return built


def largest(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


def compare(tree: dict[str, Any], lengths: list[int], width: int, choice: OpsConfig) -> None:
    """Logits of every token and the gradients of their mean loss, packed by us, each sequence alone in transformers."""
    peer = find_peer(tree)
    ours, draw = ours_of(tree, peer, choice), np.random.default_rng(3)
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
    assert largest(torch.cat(logits), torch.cat(wanted)) <= 1e-5
    assert torch.cat(wanted).std() > 0.05  # so that a difference would show
    for outputs in (logits, wanted):
        F.cross_entropy(torch.cat(outputs), torch.cat(labels)).backward()
    names = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    found = mapping.to_huggingface(names, ours.cfg)
    gradients = {name: parameter.grad for name, parameter in peer.named_parameters()}
    for name, gradient in revert_weight_conversion(peer, gradients).items():
        assert gradient is not None
        assert largest(found[name], gradient) <= 1e-5, name


@backends
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SMALL)
def test_logits_and_gradients_are_transformers_own(name: str, rows: str, choice: OpsConfig) -> None:
    lengths, width = ROWS[rows]
    compare(published.shrunk(name), lengths, width, choice)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("name", [name for name in published.CONFIGS if name != "eurobert-610m"])
def test_published_shapes_are_transformers_own(name: str) -> None:
    compare(published.CONFIGS[name], [7, 300, 150, 2], 320, NATIVE)


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_convert_and_export_give_the_same_model(name: str, tmp_path: Path) -> None:
    """Config, class, every tensor bit for bit and the logits."""
    folder = tmp_path / "hf"
    folder.mkdir()
    tokens = len(wordpiece.write(folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    tree = published.shrunk(name) | {"vocab_size": tokens, "pad_token_id": 0}
    peer = find_peer(tree)
    peer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(tree))  # as it was published
    convert.convert(folder, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("hf", "back"))
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert tree.items() <= written.items()
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back").eval()
    text = torch.randint(10, tokens, (2, 60))
    assert type(back) is type(peer) and back(text).logits.equal(peer(text).logits)
    assert back.config.to_dict().get("layer_types") == peer.config.to_dict().get("layer_types")


RATE, STEPS = 0.001, 20


def settings(name: str) -> dict[str, Any]:
    """A published model, small, as a configuration; where it has a window, that is shorter than the rows."""
    tree = published.shrunk(name) | {"vocab_size": tiny.VOCAB}
    tree |= {"local_attention": 8} if "local_attention" in tree else {}
    model = mapping.from_huggingface_config(tree, "config.json")
    changes = {f"model__{name}": value for name, value in model.model_dump().items()}
    return {"tree": tree} | changes | {"optimizer__weight_decay": 0.1, "optimizer__lr": RATE}


def our_updates(world: Any, name: str) -> dict[str, Any]:
    fields = settings(name)
    fields.pop("tree")
    engine = tiny.engine(tiny.config(**fields), world)
    found: dict[str, Any] = {"start": {name: p.detach().clone() for name, p in engine.module.named_parameters()}}
    found["losses"] = [mlm for mlm, _ in tiny.train(engine, range(STEPS), RATE)]
    return found | {"end": {name: p.detach().clone() for name, p in engine.module.named_parameters()}}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", ["modernbert-base", "nomic-embed-text"])
def test_updates_equal_those_of_a_plain_loop(name: str) -> None:
    """Losses and weights of 20 updates with AdamW, against transformers' model on the same rows."""
    (ours,) = run_ranks(1, our_updates, name)
    fields = settings(name)
    peer, cfg = find_peer(fields.pop("tree")), tiny.config(**fields)
    start = mapping.to_huggingface(ours["start"], cfg.model)
    peer = type(peer).from_pretrained(None, config=peer.config, state_dict=start).train()
    matrices, vectors = ([p for p in peer.parameters() if (p.dim() > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    betas = (cfg.optimizer.beta1, cfg.optimizer.beta2)
    optimizer = torch.optim.AdamW(groups, RATE, betas, cfg.optimizer.eps)
    for step, loss in enumerate(ours["losses"]):
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
    assert max(largest(ours["end"][name], theirs[name]) for name in theirs) <= 1e-4
    assert ours["losses"][0] - ours["losses"][-1] > 0.5
    assert max(largest(ours["start"][name], theirs[name]) for name in theirs) > 0.01

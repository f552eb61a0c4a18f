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

from megabert import ops
from megabert.commands import convert, export
from megabert.config import OpsConfig
from megabert.data.packing import pack
from megabert.hf import mapping
from megabert.model import BertForPreTraining
from tests.helpers import runs, wordpiece
from tests.hf import published

NATIVE = OpsConfig(attention="native", mlm_loss="native", layer="native")
needs_native = pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
backends = pytest.mark.parametrize(
    "choice", [pytest.param(runs.PLAIN, id="torch"), pytest.param(NATIVE, id="native", marks=needs_native)]
)
SMALL = ("modernbert-base", "roberta-base", "xlm-roberta-base", "camembert-base", "eurobert-610m")
# Lengths of sequences by row width; the windows of the small models are 16 tokens.
ROWS = {"full": ([64, 64], 64), "padded": ([40, 17], 64), "packed": ([5, 33, 1, 12, 50, 2, 25], 64)}


def peer_of(tree: dict[str, Any], seed: int = 0) -> Any:
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
    built.load_state_dict(mapping.from_huggingface(peer.state_dict(), model))
    return built


def largest(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


def compare(tree: dict[str, Any], lengths: list[int], width: int, choice: OpsConfig) -> None:
    """Logits of every token and the gradients of their mean loss, packed by us, each sequence alone in transformers."""
    peer = peer_of(tree)
    ours, draw = ours_of(tree, peer, choice), np.random.default_rng(3)
    texts = [draw.integers(5, 140, length, np.int32) for length in lengths]
    batch = pack(texts, [length // 2 for length in lengths], width)
    logits, wanted, labels = [], [], [torch.from_numpy(draw.integers(5, 140, len(text))) for text in texts]
    hidden = ours.encode(**batch.inputs()).flatten(0, 1)
    for text, start in zip(texts, batch.starts, strict=True):
        logits.append(ours.mlm_logits(hidden[start : start + len(text)]))
        wanted.append(peer(input_ids=torch.from_numpy(text).long()[None]).logits[0])
    assert largest(torch.cat(logits), torch.cat(wanted)) <= 1e-5
    assert torch.cat(wanted).std() > 0.05  # so that a difference would show
    for outputs in (logits, wanted):
        F.cross_entropy(torch.cat(outputs), torch.cat(labels)).backward()
    names = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    found = mapping.to_huggingface(names, ours.cfg)
    for name, parameter in peer.named_parameters():
        assert parameter.grad is not None
        assert largest(found[name], parameter.grad) <= 1e-5, name


@backends
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SMALL)
def test_logits_and_gradients_are_transformers_own(name: str, rows: str, choice: OpsConfig) -> None:
    lengths, width = ROWS[rows]
    compare(published.shrunk(name), lengths, width, choice)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("name", published.CONFIGS)
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
    peer = peer_of(tree)
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

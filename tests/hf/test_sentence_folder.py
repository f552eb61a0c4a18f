"""sentence-transformers gives our vectors from the folder, and folders of its own are read or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert import hf as pretrained
from megabert.commands.export import export
from megabert.hf import sentence_folder
from megabert.hf.sentence_folder import Pooling
from tests.helpers import runs

TEXTS = ["She sells sea shells by the sea shore.", "dog", "The quick brown fox, " * 12]


def write(folder: Path, pool: str = "mean", kind: str = "uncased", **model: Any) -> pretrained.Pretrained:
    return export(runs.make(folder.with_name("run"), kind, **model), folder, pool=pool)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_what_is_written_is_read(pool: str, causal: bool, tmp_path) -> None:
    start = write(tmp_path / "out", pool, causal=causal)
    assert sentence_folder.read(tmp_path / "out") == Pooling(pool, 40)
    found = pretrained.load(tmp_path / "out")
    assert all(found.weights[name].equal(start.weights[name]) for name in start.weights)
    assert found.config.data.masking.causal is causal and found.tokenizer.sha256 == start.tokenizer.sha256


def test_newer_spellings_of_a_pooling_are_read(tmp_path) -> None:
    write(tmp_path / "out")
    config = tmp_path / "out" / sentence_folder.POOLING
    config.write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": "cls"}))
    assert sentence_folder.read(tmp_path / "out").pool == "cls"


@pytest.mark.parametrize(
    ("file", "tree", "message"),
    [
        ("modules.json", [{"type": "x.Transformer"}, {"type": "x.Pooling"}, {"type": "x.Dense"}], "Transformer, Pooling, Dense"),
        ("modules.json", [1], "must hold a list of modules"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pools by max; only mean and cls"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pools by lasttoken"),
        ("1_Pooling/config.json", {}, "pools by nothing"),
        ("sentence_bert_config.json", {"max_seq_length": "8"}, "max_seq_length must be a number, is '8'"),
    ],
)  # fmt: skip
def test_unsupported_poolings_are_named(file: str, tree: Any, message: str, tmp_path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out" / file).write_text(json.dumps(tree))
    with pytest.raises(ValueError) as raised:
        sentence_folder.read(tmp_path / "out")
    assert str(raised.value).startswith(str(tmp_path / "out" / file)) and message in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "fields"),
    [("mean", {}), ("cls", {"norm": "pre"}), ("mean", {"nsp": False, "norm": "pre"}), ("cls", {"causal": True})],
    ids=["post mean", "pre cls", "no pooler", "causal"],
)
@pytest.mark.parametrize("kind", ["uncased", "unigram"])
def test_sentence_transformers_gives_our_vectors(kind, pool, fields, tmp_path) -> None:
    from sentence_transformers import SentenceTransformer

    from megabert.commands.extraction import Extractor

    start = write(tmp_path / "out", pool, kind, **fields)
    peer = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert peer.max_seq_length == 40 and peer.similarity_fn_name == "cosine"
    pooler = peer[0].auto_model.pooler  # none that nobody trained
    assert (pooler is not None) is start.config.model.nsp
    theirs = torch.from_numpy(peer.encode(TEXTS))
    extractor = Extractor(pretrained.load(tmp_path / "out"), pool=pool, normalise=True)
    ours = torch.from_numpy(extractor.encode(TEXTS))
    assert torch.allclose(ours, theirs, atol=1e-5)
    again = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    again.save(str(tmp_path / "again"))  # in the spelling of its own version
    assert sentence_folder.read(tmp_path / "again") == Pooling(pool, 40)

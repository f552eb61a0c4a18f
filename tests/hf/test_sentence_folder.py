"""sentence-transformers gives our vectors from an exported folder, and what it saves is read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megabert import hf as pretrained
from megabert.commands import export
from megabert.commands.extraction import Extractor
from tests.helpers import runs

TEXTS = ["She sells sea shells by the sea shore.", "dog", "The quick brown fox, " * 12]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "fields"),
    [("mean", {}), ("cls", {"norm": "pre"}), ("mean", {"nsp": False, "norm": "pre"}), ("cls", {"causal": True})],
    ids=["post mean", "pre cls", "no pooler", "causal"],
)
@pytest.mark.parametrize("kind", ["uncased", "unigram"])
def test_sentence_transformers_gives_our_vectors(
    kind: str, pool: str, fields: dict[str, Any], tmp_path, capsys
) -> None:
    from sentence_transformers import SentenceTransformer

    run, folder = runs.make(tmp_path / "run", kind, **fields), tmp_path / "out"
    command = ["--model", str(run), "--output", str(folder), "--sentence-transformers", pool]
    assert export.main(command) == 0
    assert f"a SentenceTransformer of {pool} vectors of step 0" in capsys.readouterr().out
    start = pretrained.load(run)
    peer = SentenceTransformer(str(folder), device="cpu")
    assert peer.max_seq_length == 40 and peer.similarity_fn_name == "cosine"
    # none that nobody trained
    pooler = peer[0].auto_model.pooler
    assert (pooler is not None) is start.config.model.nsp
    theirs = torch.from_numpy(peer.encode(TEXTS))
    ours = F.normalize(torch.from_numpy(Extractor(start, pool=pool).encode(TEXTS)), dim=-1)
    assert torch.allclose(ours, theirs, atol=1e-5)
    peer.save(str(tmp_path / "again"))
    for name, data in start.tokenizer.files().items():
        (tmp_path / "again" / name).write_bytes(data)
    again = pretrained.load(tmp_path / "again")
    encoder = [name for name in start.weights if name.startswith("layers.")]
    assert encoder and all(again.weights[name].equal(start.weights[name]) for name in encoder)

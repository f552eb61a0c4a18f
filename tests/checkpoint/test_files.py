"""Files of a checkpoint: manifests of hundreds of ranks, seals, tensors, permissions."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megabert.checkpoint.format import MOMENTS, WEIGHTS, file_name, index_slices, seal
from megabert.common.files import write_tensors
from megabert.config import load
from megabert.model import BertForPreTraining
from tests.checkpoint.test_store import saved_run, state
from tests.helpers import tiny


def test_the_manifest_of_512_ranks_is_below_a_megabyte() -> None:
    """BERT-LARGE at stage 3, where every rank holds a slice of each parameter."""
    with torch.device("meta"):
        model = BertForPreTraining(load("large_phase1", ["model.vocab_size=30528"]).model)
    shapes, ranks = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, 512
    held: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        for rank, offset in enumerate(range(0, size, -(-size // ranks))):
            held[rank].append((name, offset, min(-(-size // ranks), size - offset)))
    assert sum(map(len, held)) > 100_000
    entry = {"bytes": 10**9, "sha256": "0" * 64}
    files = {
        file_name(group, rank, ranks): entry for group in (WEIGHTS, MOMENTS) for rank in range(ranks) if held[rank]
    }
    layout = {"ranks": ranks, "files": files, "parameters": index_slices(shapes, held), "first_moment_only": []}
    assert len(seal(layout, state(1, tiny.config()), {"optimizer_steps": 1})) < 1_000_000


def test_tensors_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(5.0), "ä:1": torch.arange(6).view(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
    tensors |= {"none": torch.zeros(0), "scalar": torch.tensor(2.5), "bytes": torch.arange(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    found = write_tensors(tmp_path / "ours", tensors, {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert found["bytes"] == (tmp_path / "ours").stat().st_size
    assert all(torch.equal(tensors[name], tensor) for name, tensor in load_file(tmp_path / "ours").items())


def test_files_have_the_umask_permissions(tmp_path: Path) -> None:
    mask = 0o027
    before = os.umask(mask)
    try:
        saved_run(tmp_path, (1,))
    finally:
        os.umask(before)
    for path in (tmp_path / "checkpoints").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path

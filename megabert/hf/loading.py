"""Loading of a trained model: weights, config and tokenizer, which belong together or nothing is loaded.

Of a run, committed checkpoints alone are read and no lock is taken, so it may go on training. Of a Hugging Face folder,
nothing is run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabert import checkpoint, config
from megabert.config import Config, OpsConfig
from megabert.data.shards import Manifest
from megabert.data.tokenizer import Tokenizer
from megabert.hf import hf_read
from megabert.model import BertForPreTraining

TOKENIZER_FILES = ("tokenizer.model", "vocab.txt")  # in a run folder


@dataclass(frozen=True)
class Pretrained:
    """`weights` are fp32 by parameter name; `state` is what the checkpoint holds besides; `run_dir` is its folder.

    Of a Hugging Face folder, `initialised` are the heads that it did not have and that are those of a new model.
    """

    run_dir: Path
    weights: dict[str, Tensor]
    state: dict[str, Any]
    config: Config
    tokenizer: Tokenizer
    initialised: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def model(self, device: torch.device, dtype: torch.dtype = torch.float32) -> BertForPreTraining:
        """The model without dropout."""
        causal = self.config.data.masking.causal
        built = BertForPreTraining(self.config.model, OpsConfig(), device.type, dtype, causal)
        built.load_state_dict(self.weights)
        return built.to(device, dtype).eval()


def load(source: str | Path, tokenizer: str | Path = "") -> Pretrained:
    """The newest whole checkpoint of a run folder, or one checkpoint folder, or a Hugging Face BERT folder.

    The tokenizer is the file `tokenizer`, or lies in the folder, or in the dataset the run was trained on. Raises ValueError
    naming what is missing or does not belong to the rest.
    """
    path = Path(source)
    if not path.is_dir():
        raise ValueError(
            f"{source}: no such folder; name a run folder, one of its checkpoints, or a Hugging Face folder"
        )
    if hf_read.is_model_folder(path):
        read = hf_read.read(path, tokenizer)
        state = read.state() | {"step": 0}
        return Pretrained(path, read.weights, state, read.config, read.tokenizer, read.initialised)
    if not (path / "checkpoints").is_dir() and not (path / "manifest.json").is_file():
        raise ValueError(
            f"{source}: no checkpoint in it, so it is no run folder; no {' or '.join(hf_read.WEIGHTS)}, so it is no "
            "Hugging Face folder"
        )
    run_dir = path.resolve().parents[1] if (path / "manifest.json").is_file() else path
    newest = checkpoint.newest_step(path)
    while True:
        try:
            weights, state = checkpoint.load_weights(path)
            break
        except (ValueError, OSError):  # the run that is training may have removed it for a newer one
            before, newest = newest, checkpoint.newest_step(path)
            if newest == before:
                raise
    try:
        cfg, sha256 = config.from_dict(state["config"]), str(state["tokenizer"])
    except (KeyError, TypeError):
        raise ValueError(f"{source}: its checkpoint does not say what model or tokenizer it is of") from None
    found = _tokenizer(run_dir, cfg, sha256, tokenizer)
    if found.vocab_size != cfg.model.vocab_size:
        raise ValueError(f"{found.path}: {found.vocab_size} pieces, but the model has {cfg.model.vocab_size}")
    return Pretrained(run_dir, weights, state, cfg, found)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and values."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def manifest_of(found: Pretrained) -> Manifest | None:
    """The manifest of the dataset that the run was trained on; None where it is gone or another one by now."""
    try:
        manifest = Manifest.load(found.config.data.path)
    except (ValueError, OSError):
        return None
    return manifest if manifest.fingerprint == found.state["dataset"] else None


def _tokenizer(run_dir: Path, cfg: Config, sha256: str, named: str | Path) -> Tokenizer:
    if named:
        found = Tokenizer.load(named)
        if found.sha256 != sha256:
            raise ValueError(f"{named}: is not the tokenizer that {run_dir} was trained with (its SHA-256 differs)")
        return found
    candidates = [run_dir / name for name in TOKENIZER_FILES]
    if cfg.data.path and Path(cfg.data.path, "manifest.json").is_file():
        candidates.append(Path(cfg.data.path) / Manifest.load(cfg.data.path).tokenizer["file"])
    for path in candidates:
        if path.is_file() and (found := Tokenizer.load(path)).sha256 == sha256:
            return found
    raise ValueError(
        f"{run_dir}: its tokenizer is neither in it nor in its dataset {cfg.data.path or '(none)'}; "
        "name the file with --tokenizer"
    )

"""Provenance of a checkpoint: configuration, data, backends, versions, revision, command."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megabert.common import environment
from megabert.config import Config
from megabert.data import mixture
from megabert.data.mixture import AnyDataset
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.process_group import World
from megabert.training.sinks import STARTS


def describe(config: Config, dataset: AnyDataset, tokenizer: Tokenizer, backends: Mapping[str, str]) -> dict[str, Any]:
    """Config and its hash, data and tokenizer fingerprints, the backends that run, versions, revision, command: the head
    of each checkpoint."""
    return {
        "config": config.model_dump(),
        "config_sha256": config.digest(),
        **mixture.described(dataset),
        "tokenizer": tokenizer.sha256,
        "backends": dict(backends),
        "versions": environment.versions(),
        "revision": environment.revision(),
        "command": environment.command(),
    }


def record_start(run_dir: Path, provenance: Mapping[str, Any], world: World, step: int) -> None:
    """One more line of `starts.jsonl`: at which step the run goes on, when, and on what."""
    cuda = world.device.type == "cuda"
    start = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": world.size,
        "device": torch.cuda.get_device_name(world.device) if cuda else environment.cpu_model(),
        "cores": environment.cores(),
        "memory_gib": environment.memory_gib(),
        **{name: provenance[name] for name in ("revision", "versions", "command", "config_sha256")},
    }
    with open(run_dir / STARTS, "a") as file:
        file.write(json.dumps(start) + "\n")

"""Provenance of a checkpoint: configuration, data, backends, versions, revision, command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megabert.common import environment
from megabert.config import Config
from megabert.data import mixture
from megabert.data.mixture import AnyDataset
from megabert.data.tokenizer import Tokenizer


def describe(
    config: Config, dataset: AnyDataset, tokenizer: Tokenizer, backends: Mapping[str, str]
) -> dict[str, Any]:
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

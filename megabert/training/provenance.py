"""Where a checkpoint comes from: configuration, data, versions, revision, command."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from megabert.config import Config
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.distributed import process_group


def describe(config: Config, dataset: Dataset, tokenizer: Tokenizer) -> dict[str, Any]:
    """Where a checkpoint comes from: config and its hash, data and tokenizer fingerprints, versions, revision, command."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"  # an installed copy without its repository, or no git
    return {
        "config": config.model_dump(),
        "config_sha256": config.digest(),
        "dataset": dataset.manifest.fingerprint,
        "tokenizer": tokenizer.sha256,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **process_group.versions(),
        },
        "revision": revision,
        "command": " ".join(sys.argv),
    }

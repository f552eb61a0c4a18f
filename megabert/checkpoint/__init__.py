"""Checkpoints: saved by all ranks or not at all, verified before use, read by any number of ranks at any ZeRO stage.

Each rank writes what it owns into a hidden folder, fsyncs and hashes it, and no rank gathers the model. When all have
written, rank 0 writes the manifest, renames the folder to `step-NNNNNNNN` and replaces `pointer.json`, in a thread of its
own, and removes what is too old in another. Whatever dies before the rename leaves the previous checkpoint in place.
Before anything is loaded every file is hashed again. Nothing is ever unpickled.

    run/checkpoints/pointer.json                  the newest step
    run/checkpoints/chain.jsonl                   a line a checkpoint: digests of data, config, code, weights, logs
    run/checkpoints/step-00001000/
        manifest.json                      files (bytes, SHA-256), parameters (shape, which ranks hold which slice),
                                           counters, the run's state, its own SHA-256
        weights-00002-of-00008.safetensors the fp32 master weights that one rank held, flat, as
                                           `weight:<parameter>:<first element>`
        moments-00002-of-00008.safetensors `exp_avg` and `exp_avg_sq` of the same slices (Muon's matrices: the first)

At ZeRO stage 0, where every rank holds everything, each writes an equal share. The slices over all ranks cover every
parameter exactly once, so any number of ranks at any ZeRO stage reads what any other wrote: each rank verifies and reads its share of the files,
and they exchange the parameters over the network.
There is no random-number state: `megabert.common.random_numbers` makes it from the step.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabert.checkpoint.copies import Copies, NewestCopy, copies_of_keeper
    from megabert.checkpoint.manifest import DamagedCheckpoint
    from megabert.checkpoint.start import (
        FREE,
        check_compatible,
        kept_manifests,
        load_weights,
        newest_step,
        note_changes,
        start_engine,
        write_start,
    )
    from megabert.checkpoint.store import Checkpoints

START = (
    *("FREE", "check_compatible", "kept_manifests", "load_weights", "newest_step", "note_changes", "start_engine"),
    "write_start",
)
COPIES = ("Copies", "NewestCopy", "copies_of_keeper")
MODULES = {"DamagedCheckpoint": "manifest", "Checkpoints": "store"}
MODULES |= dict.fromkeys(START, "start") | dict.fromkeys(COPIES, "copies")


def __getattr__(name: str) -> Any:
    """What this package shows, imported when it is used: `chain` is read without torch, which these modules import."""
    if name in MODULES:
        return getattr(importlib.import_module(f"megabert.checkpoint.{MODULES[name]}"), name)
    raise AttributeError(f"module 'megabert.checkpoint' has no attribute {name!r}")

"""Checkpoints: saved by all ranks or not at all, verified before use, read by any number of ranks at any ZeRO stage.

All ranks write into a hidden folder; every file is fsynced and hashed by the rank that wrote it; rank 0 writes the
manifest, renames the folder to `step-NNNNNNNN` and replaces `pointer.json`. Whatever dies before the rename leaves the
previous checkpoint in place. Before anything is loaded every file is hashed again. Nothing is ever unpickled.

    run/checkpoints/pointer.json                  the newest step
    run/checkpoints/step-00001000/
        manifest.json                      files (bytes, SHA-256, pieces), counters, the run's state, its own SHA-256
        weights.safetensors                whole fp32 master weights by parameter name
        average.safetensors                the same of their average over the run's last updates, where it takes one
        moments-00002-of-00008.safetensors the pieces of `exp_avg` and `exp_avg_sq` that one rank held, as
                                           `exp_avg:<parameter>:<first element>`; at ZeRO stage 0 rank 0 writes alone

The pieces over all files cover every parameter exactly once, so any number of ranks at any ZeRO stage reads what any
other wrote, each rank its own slices. There is no random-number state: `megabert.common.rng` makes it from the step.
"""

from megabert.checkpoint.compatibility import check_compatible
from megabert.checkpoint.manifest import Damaged
from megabert.checkpoint.store import Checkpoints, load_weights, newest_step, start_engine, write_start

__all__ = [
    "Checkpoints",
    "Damaged",
    "check_compatible",
    "load_weights",
    "newest_step",
    "start_engine",
    "write_start",
]

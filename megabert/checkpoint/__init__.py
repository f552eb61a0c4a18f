"""Checkpoints: committed by all ranks or not at all, verified before use, read by any number of ranks at any ZeRO stage.

Each rank writes its slices to a hidden folder, fsyncs and hashes them; no rank gathers the model. When all ranks have written,
a thread of rank 0 writes the manifest, renames the folder to `step-NNNNNNNN` and replaces `pointer.json`; another thread removes
old checkpoints. A failure before the rename leaves the previous checkpoint in place. Every file is hashed again before it is
loaded. Nothing is unpickled.

    run/checkpoints/pointer.json                  the newest step
    run/checkpoints/chain.jsonl                   a line per checkpoint: digests of data, config, code, weights, logs
    run/checkpoints/step-00001000/
        manifest.json                      files (bytes, SHA-256), parameters (shape, slices by rank), counters, the run's
                                           state, the manifest's SHA-256
        weights-00002-of-00008.safetensors fp32 master weights of one rank, flat, as `weight:<parameter>:<first element>`
        moments-00002-of-00008.safetensors `exp_avg` and `exp_avg_sq` of the same slices (of Muon's matrices `exp_avg`)

At ZeRO stage 0, where every rank has all weights, each rank writes an equal share. The slices of all ranks cover every parameter
exactly once, so any number of ranks at any ZeRO stage can read them: each rank verifies and reads its share of the files, and
the ranks exchange the parameters over the network. There is no random-number state: `megabert.common.random_numbers` derives it
from the step.
"""

from megabert.checkpoint.compatibility import (
    FREE,
    check_compatible,
    check_not_finished,
    cursor_after,
    drop_incomparable,
    ends_early,
    flatten_settings,
    log_changes,
    refuse_other_tokenizer,
    refuse_other_vocabulary,
)
from megabert.checkpoint.format import DamagedCheckpoint, refuse_non_finite
from megabert.checkpoint.loading import kept_manifests, load_weights, newest_step, start_engine, write_start
from megabert.checkpoint.store import Checkpoints

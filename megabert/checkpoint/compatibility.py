"""Which settings, data and tokenizers a run may resume with, or start from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabert.checkpoint.format import MANIFEST, read_manifest
from megabert.common import storage
from megabert.common.logs import log
from megabert.common.run_files import TOKENIZER_FILES, checkpoint_name, saved_steps
from megabert.config import Config, ScheduleConfig, flat, list_phases, phase_at
from megabert.data.masking import held_out_masking
from megabert.data.shards import Manifest as DataManifest
from megabert.optim.schedule import limit_reached, share_used

# Config fields that must not change during a run: the meaning of weights and moments and the rows of an update depend on them.
FIXED = ("batch.global_size", "optimizer.name", "precision", "seed")
# Fields of phases that have started.
FIXED_IN_PHASE = ("batch.global_size", "model.rope_theta", "model.local_rope_theta")
# Fields of the model section that may change; all others are fixed.
FREE = ("dropout", "attention_dropout", "activation_checkpointing", "zero_init", "neighbour_heads", "frequency_bias")
STRATEGY = "data.masking.strategy"  # may change during a run, except to or from "causal"


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to resume a run with other data or another model.

    `saved` and `current` have "dataset", "tokenizer" (SHA-256) and "config", for a student also "teacher" (SHA-256 of its weights).
    Raises ValueError naming the field and both values.
    """
    _check_equal("dataset fingerprint", saved["dataset"], current["dataset"])
    _check_equal("tokenizer SHA-256", saved["tokenizer"], current["tokenizer"])
    _check_equal("distill.teacher's weights (SHA-256)", saved.get("teacher"), current.get("teacher"))
    old, new = flat(saved["config"]), flat(current["config"])
    of_model = {name for name in old | new if name.startswith("model.") and name.removeprefix("model.") not in FREE}
    causal = [STRATEGY] if "causal" in (old[STRATEGY], new[STRATEGY]) else []
    for name in (*sorted(of_model), *FIXED, *causal):
        _check_equal(name, old.get(name), new.get(name))
    _check_phases(saved, current)


def _check_phases(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Data and batch of phases that have started must not change, and the run must not return to an earlier phase."""
    saved_config, config = (Config.model_validate(state["config"]) for state in (saved, current))
    starts = saved.get("phase_starts", [0])
    if len(starts) > 1:
        used = share_used(config.schedule, saved["step"], saved["seconds"] / 60, saved["tokens"])
        number = phase_at(list_phases(config), used) + 1
        if number < len(starts):
            raise ValueError(
                f"cannot resume: the run is in phase {len(starts)}, but the given phases and budget put it back in "
                f"phase {number}; choose a budget or shares with which phase {len(starts) - 1} has ended"
            )
    phases = list(zip(list_phases(saved_config), list_phases(config), strict=False))[: len(starts)]
    for number, (old, new) in enumerate(phases):
        datasets = [state["phase_datasets"][number] for state in (saved, current)]
        _check_equal(f"phases.{number + 1}: dataset fingerprint", *datasets)
        for name in FIXED_IN_PHASE:
            values = (flat(phase.config.model_dump())[name] for phase in (old, new))
            _check_equal(f"phases.{number + 1}: {name}", *values)


def log_changes(saved: Mapping[str, Any], config: Config) -> None:
    """Log each setting that differs from the checkpoint's."""
    old, new = flatten_settings(saved["config"]), flatten_settings(config.model_dump())
    for name in old | new:
        if old.get(name) != new.get(name):
            log.info(f"{name} was {old.get(name)!r} and is {new.get(name)!r} from here on")


def check_not_finished(saved: Mapping[str, Any], config: Config, extend: bool) -> None:
    """Raises ValueError if the run had finished and the new schedule would continue it, unless `extend`."""
    used = saved["step"], saved["seconds"] / 60, saved["tokens"]
    was_finished = limit_reached(ScheduleConfig.model_validate(saved["config"]["schedule"]), *used)
    if was_finished and not limit_reached(config.schedule, *used) and not extend:
        raise ValueError("this run is finished, but the given schedule is longer; add --extend to continue training")


def ends_early(saved: Mapping[str, Any], config: Config) -> bool:
    """Whether a run ends at a checkpoint, by a schedule that was made shorter."""
    used = saved["step"], saved["seconds"] / 60, saved["tokens"]
    was = limit_reached(ScheduleConfig.model_validate(saved["config"]["schedule"]), *used)
    return not was and bool(limit_reached(config.schedule, *used))


def drop_incomparable(saved: Mapping[str, Any], config: Config, here: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's state without what is not comparable under `config` on the hardware `here`: the spike policy's losses, if masking,
    model or teacher changed; the best held-out loss, if the held-out rows or their masking changed, before the last phase, or without
    `eval.patience`, which alone looks for it; the time of the longest evaluation, if its rows changed."""
    state, old = dict(saved), Config.model_validate(saved["config"])
    alike = ("machine", "threads", "world_size", "phase_datasets")
    if old.eval != config.eval or any(saved.get(name) != here.get(name) for name in alike):
        state["evaluation_seconds"] = 0.0
    number = len(saved.get("phase_starts", [0])) - 1
    phases = (list_phases(each)[number].config for each in (old, config))
    was, now = ((phase.data.masking, phase.distill, phase.model) for phase in phases)
    if was != now:
        state["losses_by_objective"] = {}
    patient = not config.eval.patience or saved.get("since_best", 0) < config.eval.patience  # else the run has ended
    if patient and (held_out_masking(old), old.eval.rows) != (held_out_masking(config), config.eval.rows):
        if saved.get("best_step", -1) >= 0:
            log.info("held-out rows or their masking were changed: the next evaluation counts as the best")
        state |= {"best_step": -1, "since_best": 0}
    if not config.eval.patience or number + 1 < len(list_phases(config)):  # a last phase was added: it counts alone
        state |= {"best_step": -1, "since_best": 0}
    return state


def flatten_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Values by `section.key`, and those that phases change by `phases.N.section.key`."""
    settings = flat(tree)
    phases = settings.pop("phases", [])
    return settings | flat({f"phases.{number}": phase for number, phase in enumerate(phases, 1)})


def _check_equal(field: str, saved: Any, current: Any) -> None:
    if saved != current:
        raise ValueError(
            f"cannot resume: {field} is {current!r} but the checkpoint was made with {saved!r}; "
            "set it back or name a new run folder"
        )


def refuse_other_vocabulary(config: Config, manifest: DataManifest) -> None:
    """Raises ValueError as `refuse_other_tokenizer` for an `init_from` if data and model have vocabularies of different sizes. Reads
    nothing otherwise."""
    source = config.init_from
    if source and config.model.vocab_size not in (0, manifest.vocab_size) and (state := _newest_state(Path(source))):
        refuse_other_tokenizer(config, state, manifest)


def refuse_other_tokenizer(config: Config, state: Mapping[str, Any], manifest: DataManifest) -> None:
    """Raises ValueError unless the data has the tokenizer of the checkpoint `init_from`, whose state is `state`."""
    if state["tokenizer"] == manifest.tokenizer["sha256"]:
        return
    source, data = Path(config.init_from), list_phases(config)[0].config.data.path
    run = source if (source / "checkpoints").is_dir() else source.resolve().parents[1]
    file = next((str(run / name) for name in TOKENIZER_FILES if (run / name).is_file()), "")
    size = state["config"]["model"]["vocab_size"]
    raise ValueError(
        f"init_from={source} has a tokenizer of {size:,} tokens{f' ({file})' * bool(file)}, but {data} was built with another, of "
        f"{manifest.vocab_size:,} ({storage.join(data, manifest.tokenizer['file'])}); build the data with the first, by `megabert prep "
        f"build --tokenizer {shlex.quote(file) if file else 'FILE'} …`, or start from the model with the second, by `megabert convert "
        f"--model {shlex.quote(str(source))} --vocab {shlex.quote(data)} --run START`"
    )


def _newest_state(source: Path) -> dict[str, Any]:
    """The state of a checkpoint folder, or of a run folder's newest checkpoint, without verifying its files; {} if
    there is none. Raises DamagedCheckpoint."""
    folders = [source, *(source / "checkpoints" / checkpoint_name(step) for step in reversed(saved_steps(source)))]
    newest = next((folder for folder in folders if (folder / MANIFEST).is_file()), None)
    return read_manifest(newest)["state"] if newest else {}


def cursor_after(source: Mapping[str, Any], config: Config, manifest: DataManifest) -> int:
    """The data cursor of a run that starts from another run's checkpoint with state `source`.

    Continues after that run's rows if dataset and seed, and so order and masks, are the same; otherwise 0, also if
    that run had phases.
    """
    same = source.get("dataset") == manifest.fingerprint
    if not same or source["config"]["seed"] != config.seed or source["config"]["phases"]:
        return 0
    size = list_phases(config)[0].config.batch.global_size
    cursor = -(-source.get("cursor", 0) * source["config"]["batch"]["global_size"] // size)
    if cursor:
        log.info(f"same dataset and seed as that run: training starts after its rows, at update {cursor:,} of the data")
    return cursor

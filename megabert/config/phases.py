"""Phases of a run: parts of its budget with another row length, batch, masking, learning rate or rotary base.

The phase of an update is a function of the share of the budget used before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megabert.config.schema import Config, PhaseConfig, flat, replace, validated

# keys that a phase may change, and sections of which it may change any key
CHANGEABLE = (
    *("data.path", "data.mix", "data.seq_len", "data.masking", "batch", "optimizer.lr"),
    *("model.rope_theta", "model.local_rope_theta"),
    *(f"schedule.{key}" for key in ("name", "power", "final_ratio", "decay_share", "budget_warmup")),
)


@dataclass(frozen=True)
class Phase:
    """The configuration of updates before which a share from `begin` to below `end` of the run's budget was used."""

    begin: float
    end: float
    config: Config  # the run's config with the phase's changes and without phases
    own_schedule: bool  # the learning rate follows the phase's schedule, over its share of the budget
    changes: str  # its changes, as text


def list_phases(config: Config) -> list[Phase]:
    """The phases of a run in order; a run without `phases` is one phase, or two with `objective.causal_share`. Raises ValueError naming
    phase and key."""
    given = config.phases
    if not given and (share := config.objective.causal_share):
        causal = {"share": share, "data": {"masking": {"strategy": "causal"}}}
        given = [PhaseConfig.model_validate(causal), PhaseConfig(share=float(1 - Fraction(repr(share))))]
    given = given or [PhaseConfig(share=1.0)]
    # exact, so that phases change at the update given by the shares
    parts = [Fraction(repr(phase.share)) for phase in given]
    ends = [float(sum(parts[: number + 1]) / sum(parts)) for number in range(len(parts))]
    phases = []
    for number, (begin, end, phase) in enumerate(zip([0.0, *ends], ends, given, strict=False), 1):
        text = ", ".join(f"{name}={value}" for name, value in flat(phase.changes).items()) or "the run's own settings"
        changed = _changed(config, phase.changes, f"phases.{number}")
        phases.append(Phase(begin, end, changed, "schedule" in phase.changes, text))
    return phases


def phase_at(phases: Sequence[Phase], share: float) -> int:
    """Index of the phase of an update before which `share` (0 to 1) of the run's budget was used."""
    return sum(share >= phase.begin for phase in phases[1:])


def config_at(config: Config, saved: Mapping[str, Any]) -> Config:
    """A run's configuration with the model of its phase at the checkpoint of this state."""
    number = len(saved.get("phase_starts", [0])) - 1
    return replace(config, "model", list_phases(config)[number].config.model)


def check_phases(config: Config) -> None:
    """Raises ValueError naming a phase and key that contradicts another, and what to do."""
    phases = list_phases(config)
    for message in _contradictions(config, phases) if config.phases else ():
        raise ValueError(message)


def _contradictions(config: Config, phases: Sequence[Phase]) -> Iterator[str]:
    schedule, masking = config.schedule, config.data.masking
    if config.objective.causal_share:
        yield "objective.causal_share is a phase: set it to 0, and data.masking.strategy=causal in one of phases"
    budgets = {"steps": schedule.total_steps, "minutes": schedule.budget_minutes, "tokens": schedule.budget_tokens}
    total, whole = sum(phase.share for phase in config.phases), budgets[schedule.unit]
    if abs(total - 1) > 1e-6 and abs(total - whole) > 1e-6 * whole:
        yield f"phases: their shares sum to {total:g}; make it 1, or the run's budget, {whole:g} {schedule.unit}"
    for number, phase in enumerate(phases, 1):
        where, own, causal = f"phases.{number}", phase.config.schedule, phase.config.data.masking.causal
        if own.unit != schedule.unit:
            units = f"schedule.name={own.name} counts {own.unit}, the run {schedule.unit}"
            yield f"{where}: {units}; set schedule.by=minutes instead of schedule.name=budget"
        if phase.config.model != config.model and not config.model.gated:
            yield f"{where}: rotary positions need model.kind=modern or nomic"
        if config.distill.teacher and causal != masking.causal:
            yield f"{where}: distill.teacher needs one objective throughout; remove data.masking.strategy"
        if phase.own_schedule and own.name == "wsd" and own.budget_warmup + own.decay_share > 1:
            yield f"{where}: schedule.budget_warmup + schedule.decay_share exceed 1; lower one of them"
        if number == len(phases) and causal != masking.causal:
            differs = f"data.masking.strategy={phase.config.data.masking.strategy}, but the run's own"
            yield f"{where}: {differs}, which its last phase must have, is {masking.strategy}"


def _changed(config: Config, changes: Mapping[str, Any], where: str) -> Config:
    for name in flat(changes):
        if not any(f"{name}.".startswith(f"{key}.") for key in CHANGEABLE):
            raise ValueError(f"{where}.{name}: stays the same during a run; a phase changes {', '.join(CHANGEABLE)}")
    tree, data = config.model_dump() | {"phases": [], "objective": {"causal_share": 0.0}}, changes.get("data", {})
    if data.keys() & {"path", "mix"}:
        tree["data"]["mix"] = {}
    if "path" in data:
        tree["data"]["seq_len"] = 0  # another dataset may have other rows
    if "schedule" in changes:
        tree["schedule"] |= {"warmup_steps": 0, "budget_warmup": 0.0}
    merge(tree, changes)
    return validated(tree, where)


def merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put nested dicts over others, in place."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            merge(tree[name], value)
        else:
            tree[name] = value

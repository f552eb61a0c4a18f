"""Phases of a run: parts of its budget with another row length, batch, masking, learning rate or rotary base.

A phase is a table of `phases`: its share of the budget, and the keys that it changes. The phase of an update is a function of
the share of the budget used before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megabert.config.schema import Config, check, flat, replace, validated

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
    # the run's config with the phase's changes and without phases
    config: Config
    # the learning rate follows the phase's schedule, over its share of the budget
    own_schedule: bool
    # its changes, as text
    changes: str


def list_phases(config: Config) -> list[Phase]:
    """The phases of a run in order; a run without `phases` is one phase. Raises ValueError naming phase and key."""
    share = config.objective.causal_share
    causal = {"share": share, "data": {"masking": {"strategy": "causal"}}}
    tables = config.phases or ([causal, {"share": 1.0 - share}] if share else [{"share": 1.0}])
    # exact, so that phases change at the update given by the shares
    parts = [Fraction(repr(_share(table, f"phases.{number}"))) for number, table in enumerate(tables, 1)]
    ends = [float(sum(parts[: number + 1]) / sum(parts)) for number in range(len(parts))]
    phases = []
    for number, (begin, end, table) in enumerate(zip([0.0, *ends], ends, tables, strict=False), 1):
        changes = {name: value for name, value in table.items() if name != "share"}
        text = ", ".join(f"{name}={value}" for name, value in flat(changes).items()) or "the run's own settings"
        phases.append(Phase(begin, end, _changed(config, changes, f"phases.{number}"), "schedule" in changes, text))
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
    phases, schedule = list_phases(config), config.schedule
    if not config.phases:
        return
    if config.objective.causal_share:
        raise ValueError(
            "objective.causal_share is a phase: set it to 0, and data.masking.strategy=causal in one of phases"
        )
    total, whole = sum(table["share"] for table in config.phases), float(schedule.total_steps)
    if schedule.unit != "steps":
        whole = schedule.budget_minutes if schedule.unit == "minutes" else schedule.budget_tokens
    if abs(total - 1) > 1e-6 and abs(total - whole) > 1e-6 * whole:
        raise ValueError(
            f"phases: their shares sum to {total:g}; make it 1, or the run's budget, {whole:g} {schedule.unit}"
        )
    for number, phase in enumerate(phases, 1):
        changed, where = phase.config, f"phases.{number}"
        try:
            check(changed)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if changed.schedule.unit != schedule.unit:
            raise ValueError(
                f"{where}: schedule.name={changed.schedule.name} counts {changed.schedule.unit}, the run {schedule.unit}; "
                "set schedule.by=minutes instead of schedule.name=budget"
            )
        if changed.model != config.model and not config.model.gated:
            raise ValueError(f"{where}: rotary positions need model.kind=modern or nomic")
        if changed.distill.teacher and changed.data.masking.causal != config.data.masking.causal:
            raise ValueError(f"{where}: distill.teacher needs one objective throughout; remove data.masking.strategy")
        if (
            phase.own_schedule
            and changed.schedule.name == "wsd"
            and changed.schedule.budget_warmup + changed.schedule.decay_share > 1
        ):
            raise ValueError(f"{where}: schedule.budget_warmup + schedule.decay_share exceed 1; lower one of them")
    if changed.data.masking.causal != config.data.masking.causal:
        raise ValueError(
            f"{where}: data.masking.strategy={changed.data.masking.strategy}, but the run's own, which its last phase must have, "
            f"is {config.data.masking.strategy}"
        )


def _share(table: Mapping[str, Any], where: str) -> float:
    share = table.get("share")
    if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
        raise ValueError(f"{where}.share: give a number above 0, its share of the run's budget (got {share!r})")
    return share


def _changed(config: Config, changes: Mapping[str, Any], where: str) -> Config:
    for name in flat(changes):
        if not any(f"{name}.".startswith(f"{key}.") for key in CHANGEABLE):
            raise ValueError(f"{where}.{name}: stays the same during a run; a phase changes {', '.join(CHANGEABLE)}")
    tree, data = config.model_dump() | {"phases": [], "objective": {"causal_share": 0.0}}, changes.get("data", {})
    if data.keys() & {"path", "mix"}:
        tree["data"]["mix"] = {}
    if "path" in data:
        # another dataset may have other rows
        tree["data"]["seq_len"] = 0
    if "schedule" in changes:
        tree["schedule"] |= {"warmup_steps": 0, "budget_warmup": 0.0}
    _merge(tree, changes)
    return validated(tree, f"{where}.")


def _merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value

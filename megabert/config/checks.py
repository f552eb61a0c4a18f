"""Rules about several fields of a configuration at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megabert.config.schema import Config

FP8_MULTIPLE = 16  # of both sizes of a weight that is multiplied in FP8


def check(config: Config) -> None:
    """Raises ValueError naming the first two fields that contradict each other, and what to do."""
    model, masking, schedule = config.model, config.data.masking, config.schedule
    causal = "data.masking.strategy=causal" if masking.causal else "objective.causal_share above 0"
    if model.hidden % model.heads:
        raise ValueError(f"model.heads={model.heads} does not divide model.hidden={model.hidden}")
    if model.modern:
        for field, value in (("norm", "pre"), ("nsp", False)):
            if getattr(model, field) != value:
                shown = str(value).lower()
                raise ValueError(
                    f"model.kind=modern needs model.{field}={shown}; it is {str(getattr(model, field)).lower()}"
                )
        if model.hidden // model.heads % 2:
            raise ValueError(
                f"model.kind=modern turns pairs of columns: model.hidden / model.heads = {model.hidden // model.heads} is odd"
            )
    if masking.mask + masking.random > 1:
        raise ValueError("data.masking.mask + data.masking.random exceed 1")
    if config.causal_updates and model.nsp:
        raise ValueError(
            f"{causal}: [CLS] sees nothing but itself, so it cannot tell whether B follows A; set model.nsp=false"
        )
    if config.causal_updates and config.ops.attention in ("varlen", "cudnn"):
        raise ValueError(
            f"ops.attention={config.ops.attention} attends to whole sequences, which {causal} must not; "
            "set ops.attention to auto, sdpa, native or fused_softmax"
        )
    if config.objective.causal_share:
        if masking.causal:
            raise ValueError(
                "objective.causal_share is for runs that end with masked LM; set it to 0, or data.masking.strategy to "
                "token, word or span"
            )
        if config.distill.teacher:
            raise ValueError("objective.causal_share: distill.teacher reads in one way throughout; set it to 0")
    if config.precision == "fp8":
        if model.layers < 3:
            raise ValueError(
                f"precision=fp8 keeps the first and the last layer in bf16: model.layers={model.layers} leaves none; use bf16"
            )
        for name, width in (("hidden", model.hidden), ("intermediate", model.ffn)):
            if width % FP8_MULTIPLE:
                raise ValueError(
                    f"precision=fp8 needs multiples of {FP8_MULTIPLE}: model.{name} is {width}; change it or use bf16"
                )
    asked = "schedule.name=budget" if schedule.name == "budget" else f"schedule.by={schedule.by}"
    if schedule.unit == "minutes" and not schedule.budget_minutes:
        raise ValueError(f"{asked} needs schedule.budget_minutes above 0")
    if schedule.unit == "tokens" and not schedule.budget_tokens:
        raise ValueError(f"{asked} needs schedule.budget_tokens above 0")
    if schedule.unit == "minutes" and config.deterministic:
        raise ValueError(
            f"deterministic=true: {asked} reads the clock, so that no two runs are the same; choose another"
        )
    if config.optimizer.split_qkv and config.optimizer.name != "lamb":
        raise ValueError(
            f"optimizer.split_qkv=true: optimizer.name={config.optimizer.name} has no trust ratios; set it to false"
        )
    if schedule.unit == "steps" and schedule.warmup_steps > schedule.total_steps:
        raise ValueError("schedule.warmup_steps exceeds schedule.total_steps; lower it")
    if schedule.name.startswith("wsd") and schedule.warmup_share + schedule.decay_share > 1:
        raise ValueError(
            f"schedule.decay_share={schedule.decay_share:g} and a warm-up of {schedule.warmup_share:.2g} of the budget are more "
            "than all of it; lower one of them"
        )

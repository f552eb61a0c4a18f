"""Typed configuration of a run: schema and presets, overrides, and DeepSpeed's configuration."""

from megabert.config.deepspeed import (
    accumulation,
    fit_micro_size,
    merge_deepspeed,
    read_deepspeed,
    shares,
    to_deepspeed,
)
from megabert.config.phases import Phase, config_at, list_phases, phase_at
from megabert.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    MaskingConfig,
    ModelConfig,
    OpsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SpikesConfig,
    WatchdogConfig,
    flat,
    replace,
)
from megabert.config.sources import (
    changed,
    collect_overrides,
    from_arguments,
    from_dict,
    load,
    refuse_unknown_overrides,
    refuse_unused,
    value_sources,
)

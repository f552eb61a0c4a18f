"""Typed configuration of a run: schema and presets, overrides, and DeepSpeed's configuration."""

from megabert.config.deepspeed import (
    accumulation,
    fit_micro_size,
    merge_deepspeed,
    read_deepspeed,
    shares,
    to_deepspeed,
)
from megabert.config.phases import Phase, config_at, phase_at, phases_of
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
    from_arguments,
    from_dict,
    load,
    overrides_of,
    refuse_unknown_overrides,
    value_sources,
)

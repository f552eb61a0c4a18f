"""DeepSpeed's configuration for a run, the micro-steps of an update, and the user's DeepSpeed file, which may only add keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megabert.common.files import parse_object
from megabert.config.schema import Config, replace

# Keys of a user's file without effect or with another one, or that a run sets itself, and what to do instead.
CONFIG_KEYS = {
    "train_batch_size": "remove it and set batch.global_size",
    "train_micro_batch_size_per_gpu": "remove it and set batch.micro_size",
    "gradient_accumulation_steps": "remove it and set batch.global_size or batch.micro_size",
    "gradient_clipping": "remove it and set optimizer.clip",
    "steps_per_print": "remove it and set log.interval",
    "zero_optimization.stage": "remove it and set zero.stage",
    "bf16.enabled": "remove it and set precision",
    "fp16.enabled": "remove it and set precision",
    "optimizer": "remove it and set optimizer.*",
    "scheduler": "remove it and set schedule.*",
    "bfloat16": "remove it and set precision",
    "torch_autocast": "remove it and set precision",
    "bf16.immediate_grad_update": "remove it: gradients are added up in fp32 as they come",
    "gradient_allreduce_op": "remove it: a gradient is the mean over the global batch",
    "activation_checkpointing": "remove it and set model.activation_checkpointing",
    "compile": "remove it and set ops.layer=compiled",
    "data_efficiency": "remove it and set phases",
    "zero_optimization.offload_optimizer": "remove it: the optimizer's state stays on the device",
    "zero_optimization.offload_param": "remove it: the weights stay on the device",
    "zero_optimization.cpu_offload": "remove it: the optimizer's state stays on the device",
    "zero_optimization.cpu_offload_param": "remove it: the weights stay on the device",
    "zero_optimization.stage3_module_granularity_threshold": "remove it: a module's weights are gathered at its own calls",
    "zero_optimization.zenflow": "remove it: the optimizer is optimizer.name",
    "managed_gradient_accumulation": "remove it: an update's micro-steps are DeepSpeed's",
}


def read_deepspeed(file: str) -> dict[str, Any] | None:
    """The keys of a user's DeepSpeed file; None without a file. Raises ValueError or OSError naming the file."""
    return parse_object(Path(file).read_bytes(), f"--deepspeed_config {file}") if file else None


def to_deepspeed(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration for this run; pure.

    The learning rate and clipping are computed here (no `scheduler`, no `optimizer` entry); DeepSpeed accumulates.
    """
    zero: dict[str, Any] = {"stage": config.zero.stage}
    if config.zero.stage in (1, 2):
        zero["round_robin_gradients"] = False
    if config.zero.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = False
        zero["stage3_param_persistence_threshold"] = 10_000
    result: dict[str, Any] = {
        "train_batch_size": config.batch.micro_size * accumulation(config, world_size) * world_size,  # places for rows
        "train_micro_batch_size_per_gpu": config.batch.micro_size,
        "gradient_accumulation_steps": accumulation(config, world_size),
        "gradient_clipping": config.optimizer.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device twice a micro-step
    }
    assert config.precision != "auto", "must be resolved for the device"
    # both are set, so that a user's file with the other one is refused
    result["bf16"], result["fp16"] = {"enabled": config.precision == "bf16"}, {"enabled": False}
    if result["bf16"]["enabled"]:
        result["data_types"] = {"grad_accum_dtype": "fp32"}
        result["communication_data_type"] = "fp32"  # otherwise gradients are averaged over the ranks in bf16
    return result


def merge_deepspeed(ours: dict[str, Any], user: dict[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """`ours` with the user's additional keys. Raises ValueError naming the first key that contradicts ours or is set by a config
    key."""
    merged = dict(ours)
    for key, value in user.items():
        name = f"{prefix}{key}"
        off = ({"device": "none"}, False) if prefix else ()  # no offload
        if key not in ours and name in CONFIG_KEYS and value not in off:
            raise ValueError(f"{source}: {name} is not for this file; {CONFIG_KEYS[name]}")
        if key not in ours:
            merged[key] = value
        elif isinstance(ours[key], dict) and isinstance(value, dict):
            merged[key] = merge_deepspeed(ours[key], value, source, f"{name}.")
        elif value != "auto" and value != ours[key]:
            instead = CONFIG_KEYS.get(name, "remove it")
            raise ValueError(f"{source}: {name}={value!r} contradicts the run's {ours[key]!r}; {instead}")
    return merged


def fit_micro_size(config: Config, world_size: int) -> Config:
    """The config with the smallest `batch.micro_size` that needs as many micro-steps as its own; pure."""
    rows = accumulation(config, world_size) * world_size
    return replace(config, "batch.micro_size", -(-config.batch.global_size // rows))


def accumulation(config: Config, world_size: int) -> int:
    """Micro-steps of an update. Where ranks and micro-batches do not divide the global batch, the last micro-step has filler rows,
    which have no loss."""
    return -(-config.batch.global_size // (config.batch.micro_size * world_size))


def shares(config: Config, world_size: int) -> str:
    """The rows of an update as text: `64 x 24 ranks x 43 micro-steps minus 512 filler rows`."""
    micro, steps = config.batch.micro_size, accumulation(config, world_size)
    filler = micro * world_size * steps - config.batch.global_size
    return f"{micro} x {world_size} ranks x {steps} micro-steps" + (f" minus {filler} filler rows" if filler else "")

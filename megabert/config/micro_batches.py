"""How an update's rows are dealt out over ranks and micro-steps."""

from __future__ import annotations

from megabert.config.schema import Config


def fit_micro_size(config: Config, world_size: int) -> Config:
    """The config with the smallest `batch.micro_size` that needs no more micro-steps than the one it has; pure."""
    batch = config.batch
    rows = accumulation(config, world_size) * world_size
    fitted = batch.model_copy(update={"micro_size": -(-batch.global_size // rows)})
    return config.model_copy(update={"batch": fitted})


def accumulation(config: Config, world_size: int) -> int:
    """Micro-steps of an update. Where ranks and micro-batches do not divide the global batch, the last micro-step has seats
    without a row: they hold fillers, which count for nothing."""
    return -(-config.batch.global_size // (config.batch.micro_size * world_size))


def shares(config: Config, world_size: int) -> str:
    """How an update's rows come about, for a reader: `64 x 24 ranks x 43 micro-steps less 512 seats`."""
    micro, steps = config.batch.micro_size, accumulation(config, world_size)
    vacant = micro * world_size * steps - config.batch.global_size
    return f"{micro} x {world_size} ranks x {steps} micro-steps" + (f" less {vacant} seats" if vacant else "")

"""Training engine on DeepSpeed, the optimizers under it, the layout of its partitions, learning-rate schedules, precision."""

from megabert.engine.deepspeed_engine import Engine, Snapshot
from megabert.engine.precision import DTYPES
from megabert.engine.result import UpdateResult

__all__ = ["DTYPES", "Engine", "Snapshot", "UpdateResult"]

"""Training engine on DeepSpeed, the optimizers under it, the layout of its partitions, learning-rate schedules."""

from megabert.engine.deepspeed_engine import DTYPES, Engine, Snapshot
from megabert.engine.result import UpdateResult

__all__ = ["DTYPES", "Engine", "Snapshot", "UpdateResult"]

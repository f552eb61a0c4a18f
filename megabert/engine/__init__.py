"""DeepSpeed and the optimizers under it."""

from megabert.engine.deepspeed_engine import DTYPES, Engine, Snapshot
from megabert.engine.result import UpdateResult

__all__ = ["DTYPES", "Engine", "Snapshot", "UpdateResult"]

"""Training engine on DeepSpeed: an update and its step, the layout of ZeRO's partitions, precision."""

from megabert.engine.deepspeed_engine import Engine
from megabert.engine.deepspeed_step import import_deepspeed
from megabert.engine.precision import DTYPES
from megabert.engine.rank_times import RankMetrics
from megabert.engine.update_result import UpdateResult, loss_table
from megabert.engine.zero_layout import Snapshot

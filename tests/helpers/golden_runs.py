"""The small dataset that the repository holds, datasets like it, and runs on them in this process."""

import hashlib
import math
import shutil
from pathlib import Path
from typing import Any

from megabert import config as configuration
from megabert.data.shards import Dataset
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import Watchdog
from megabert.open_run import open_run
from megabert.trainer import Trainer
from tests.helpers.loop import StopAt
from tests.helpers.rows import SPECIAL, make_dataset, make_rows

DATA = Path(__file__).resolve().parents[1] / "data" / "golden" / "dataset"
SMALL = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=8", "batch.micro_size=4"),
    *("schedule.total_steps=2", "schedule.warmup_steps=0", "eval.interval=0", "eval.rows=8", "peak_tflops=1.0"),
    *("log.interval=1", "log.tensorboard=false", "data.workers=0", "precision=fp32"),
)


def random_rows(folder: Path, rows: int, seed: int, seq_len: int = 64, slots: int = 2, **changes: Any) -> Path:
    """A dataset with the tokenizer of DATA, and its row length unless another is given."""
    tokenizer = Dataset(DATA).manifest.tokenizer
    ids, bounds, isnext = make_rows(rows, seq_len, slots, seed)
    ordinary = ids > max(SPECIAL.values())
    ids[ordinary] = ids[ordinary] % (tokenizer["vocab_size"] - len(SPECIAL)) + len(SPECIAL)
    arrays = (ids, bounds, isnext)
    make_dataset(folder, rows, seq_len=seq_len, slots=slots, arrays=arrays, tokenizer=tokenizer, **changes)
    shutil.copy(DATA / tokenizer["file"], folder)
    return folder


def held_out_of(inner: Path, rows: int) -> dict[str, Any]:
    """What a manifest says of the held-out split `inner` in its folder."""
    sha256 = hashlib.sha256((inner / "manifest.json").read_bytes()).hexdigest()
    return {"path": inner.name, "rows": rows, "manifest_sha256": sha256}


def opened(world: World, folder: Path, *overrides: str, left: Any = lambda: math.inf, **options: Any) -> Trainer:
    """The trainer of a run of SMALL on DATA; `left`: seconds to its time limit."""
    cfg = configuration.load("tiny", [*SMALL, f"data.path={DATA}", *overrides])
    return open_run(folder, cfg, world, StopAt(seconds=left), Watchdog(world, folder, 0.0), **options)


def trained(world: World, folder: Path, *overrides: str, **options: Any) -> dict[str, float]:
    """The last held-out figures of a run."""
    trainer = opened(world, folder, *overrides, **options)
    assert trainer.train()
    trainer.close()
    return trainer.last_eval

"""Updates of the real engine on random ids, to prove that a configuration trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megabert import distillation
from megabert.config import BATCH, Config
from megabert.data.batch import Batch, Shape, Update, collate
from megabert.data.masking import Masking, Vocabulary, mask
from megabert.data.objective import masking_at
from megabert.data.shards import Rows
from megabert.distributed.process_group import World
from megabert.engine import Engine
from megabert.optim import schedule


def fake_batch(config: Config, seq_len: int, seed: int, masking: Masking | None = None) -> Batch:
    """`batch.micro_size` full rows of `seq_len` random ids by `seed`, one pair each, collated as real ones and masked by
    `masking` (None: as the run's first update)."""
    rows, vocab = config.batch.micro_size, config.model.vocab_size
    options = masking or masking_at(config, 0.0, seq_len)
    draw = np.random.default_rng(seed)
    bounds = np.full((rows, 1, 2), (seq_len, seq_len // 2), np.uint16)
    isnext = (np.arange(rows, dtype=np.int8) % 2 if config.model.nsp else np.full(rows, -1, np.int8))[:, None]
    data = Rows(draw.integers(5, vocab, (rows, seq_len), np.uint32), bounds, isnext)
    vocabulary = Vocabulary(vocab, 4, range(5), np.ones(vocab, bool))
    row_ids = np.arange(rows)
    masked = mask(data.ids, bounds, row_ids, seed=seed, epoch=0, vocabulary=vocabulary, masking=options)
    shape = Shape(rows, seq_len, 1, options.capacity(seq_len))
    narrow, wide = shape.empty()
    views = shape.carve(narrow, wide)
    views["epochs"][:] = 0
    collate(data, masked, row_ids, row_ids * seq_len, views, options.causal)
    return shape.batches(torch.from_numpy(narrow), torch.from_numpy(wide), rows)[0]


def fake_step(
    config: Config, seq_len: int, world: World, tokenizer: str = "", deepspeed_extra: Mapping[str, Any] | None = None
) -> str:
    """One update of the real engine on random ids at this process's world size, and one of its second objective where it has
    two; a line that says how it went. `deepspeed_extra` agrees with the run's own batch.

    Rows have `seq_len` tokens; `tokenizer` is the SHA-256 of the data's, "" without data. A collective. The global batch is reduced to two micro-steps of at most two rows a rank: model, precision, ZeRO
    stage, optimizer and operations are the run's. Raises ValueError when the loss or the gradient is not finite.
    """
    micro = min(config.batch.micro_size, 2)
    batch = config.batch.model_copy(update={"micro_size": micro, "global_size": micro * world.size * 2})
    reduced = config.model_copy(update={"batch": batch})
    # without what it says of the whole batch
    extra = {key: value for key, value in (deepspeed_extra or {}).items() if key not in BATCH}
    engine = Engine(reduced, lambda: distillation.build(config, tokenizer, world.device), world, extra)
    lr = schedule.learning_rate(config.schedule, config.optimizer.lr, 1, 0.0)
    objectives = {masking.objective: masking for masking in (masking_at(config, s, seq_len) for s in (0.0, 1.0))}
    shown = []
    for step, (objective, masking) in enumerate(objectives.items()):
        batches = [fake_batch(reduced, seq_len, 2 * world.rank + number, masking) for number in range(2)]
        result = engine.train_update(Update(step, 0, batches, objective=objective), lr)
        loss, norm = float(result.losses.sum()), float(result.grad_norm)
        if not math.isfinite(loss) or (result.skipped and not result.overflow):
            raise ValueError(f"the fake update is not finite: loss {loss}, gradient norm {norm}")
        shown.append(f"loss {loss:.4f}, |g| {norm:.3f}")
    count = "one fake update" if len(shown) == 1 else "a fake update of either objective"
    return f"{count} worked: {'; '.join(shown)}; {engine.describe()} (reduced from {config.batch.global_size:,})"

"""Engine without arithmetic: what ranks hold, save and send in an update, but for a model's activations and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from megabert.config import Config, accumulation
from megabert.distributed.ranks import World
from megabert.engine import Engine, UpdateResult
from megabert.engine.rank_times import ComputeTime
from megabert.engine.update_result import HostCopy
from megabert.engine.zero_layout import ZeroLayout, slice_of_group
from megabert.optim.build import build_optimizer


class RehearsedEngine(Engine):
    """An engine without DeepSpeed, forward and backward passes: this rank's partition of weights and moments at ZeRO stage 1,
    the collectives of an update but for the gradients', and the Engine's own snapshots and restores.

    Update 0 sets each weight to a number that follows from its place in the model. Every later update, also of another start
    and on other ranks, asserts that it still is.
    """

    def __init__(
        self, config: Config, model: Any, world: World, deepspeed_extra: Mapping[str, Any] | None = None
    ) -> None:
        """`model` builds the module, which gives the shapes and counts what a batch predicts."""
        self.config, self.world, self.dtype = config, world, torch.float32
        self.accumulation = accumulation(config, world.size)
        module = self.module = model()
        self.terms, self._counts, self.optimizer_kernels = module.terms, module.counts, "torch"
        self.optimizer = build_optimizer(config.optimizer, self.module)
        named = dict(self.module.named_parameters())
        index_of, masters = {id(parameter): index for index, parameter in enumerate(named.values())}, []
        for group in self.optimizer.param_groups:
            flat = torch.zeros(-(-sum(parameter.numel() for parameter in group["params"]) // world.size))
            masters.append(slice_of_group(flat, group["params"], world.rank, index_of))
            group["params"] = [flat]
        self.layout = ZeroLayout({name: p.shape for name, p in named.items()}, tuple(masters), partitioned=True)
        self.optimizer.attach({master.tensor: master.segments for master in masters}, world.device, world)
        self.compute_time, self._skipped = ComputeTime(world.device), torch.zeros((), dtype=torch.float64)
        self.progress: Callable[[], None] = lambda: None
        methods = dict.fromkeys(("set_train_micro_batch_size", "set_train_batch_size"), lambda size: None)
        self._deepspeed = SimpleNamespace(global_steps=0, global_samples=0, micro_steps=0, **methods)
        # (epoch, row id) of the rows that this rank was given
        self.rows: list[tuple[int, int]] = []

    def train_update(self, update: Any, lr: float, veto: Callable[[float], bool] | None = None) -> UpdateResult:
        """An update that changes no weight, with losses of 1."""
        for segment, view in self.layout.segments():
            expected = (torch.arange(segment.offset, segment.stop) % 4093 + segment.index).float()
            if update.step == 0:
                view.copy_(expected)
            assert torch.equal(view, expected), f"{self.layout.names[segment.index]} is not what was saved"
        self.rows += [(int(e), int(r)) for e, r in zip(update.epochs, update.row_ids, strict=True) if r >= 0]
        counts = [sum(parts) for parts in zip(*map(self._counts, update.batches), strict=True)]
        totals = self._sum_over_ranks(torch.tensor(counts, dtype=torch.float64))
        correct = self._sum_over_ranks(torch.zeros(2 * len(counts), dtype=torch.float64))[len(counts) :]
        losses, applied = torch.ones(len(counts), dtype=torch.float64), torch.ones(())
        norm = self.optimizer.guard([], 0.0)
        self.optimizer.resume([master.tensor for master in self.layout.masters], update.step + 1)
        self._deepspeed.global_steps += 1
        self.progress()
        return UpdateResult(
            loss=losses.sum(),
            losses=losses,
            correct=correct,
            counts=totals,
            grad_norm=norm,
            applied=applied,
            vetoed=False,
            host_loss=HostCopy(losses.sum()),
            host_applied=HostCopy(applied),
        )

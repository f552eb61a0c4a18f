"""Training engine: a model under DeepSpeed ZeRO, one call an update.

Losses are sums divided by the global counts of the update, so the update does not depend on ranks and micro-steps. A module names
its k losses in `terms`, their factors in the total in `weights`, and the number of items that a batch sums for each in
`counts(batch)`; it returns the k sums followed by k counts of correct answers. A non-finite loss or gradient on any rank skips the
update on all ranks. An update reads nothing back from the device and copies to it only from pinned memory, so that the host runs
ahead. Exceptions: a veto reads the loss; stage 3 waits for its own side streams.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabert.common import environment, random_numbers
from megabert.config import Config, accumulation, flat, shares
from megabert.distributed.ranks import World, check_same, on_every_rank
from megabert.engine import deepspeed_step
from megabert.engine.precision import DTYPES, make_deterministic
from megabert.engine.rank_times import ComputeTime
from megabert.engine.update_result import HostCopy, UpdateResult, doubles, loss_table, scaled_loss
from megabert.engine.zero_layout import COUNTERS, WEIGHT, Snapshot, Stored, check_shapes, find_layout
from megabert.optim import apex
from megabert.optim.build import build_optimizer
from megabert.optim.guarded import MOMENTS, RATE, to_device

# Environment variables that change which kernels torch and its libraries run, and so the numerical results.
NUMERIC_VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ATEN_CPU_CAPABILITY"),
    *("DS_ACCELERATOR", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
)


class Engine:
    """A model under DeepSpeed ZeRO with this run's optimizer."""

    def __init__(
        self,
        config: Config,
        model: nn.Module | Callable[[], nn.Module],
        world: World,
        deepspeed_extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`model` (or a function that builds it) has fp32 weights; `deepspeed_extra` has additional DeepSpeed keys of the user.

        A collective. Raises ValueError naming a key of `deepspeed_extra` that contradicts the config, and RankError naming the ranks
        whose config, kernels or versions differ.
        """
        # --debug has enabled them already, with its own settings
        if config.deterministic and not torch.are_deterministic_algorithms_enabled():
            make_deterministic()
        if config.zero.stage == 0 and world.device.type == "cpu":  # sums depend on the number of threads
            torch.set_num_threads(-world.max_ints([-torch.get_num_threads()])[0])
        deepspeed = deepspeed_step.import_deepspeed(world)
        self.config, self.world = config, world
        self.dtype = DTYPES[config.precision]
        self.accumulation = accumulation(config, world.size)
        settings = deepspeed_step.settings(config, world.size, deepspeed_extra or {})
        self.optimizer_kernels = on_every_rank(world, lambda: _optimizer_kernels(config, world.device))
        module: Any = model if isinstance(model, nn.Module) else model()
        check_same(world, rank_facts(config, settings, world.device, module, self.optimizer_kernels))
        self.module: nn.Module = module
        self.terms: tuple[str, ...] = module.terms
        self._weights = torch.tensor(module.weights, dtype=torch.float64, device=world.device)
        self._counts: Callable[[Any], tuple[int, ...]] = module.counts
        self._takes_seed = "seed" in inspect.signature(module.forward).parameters
        self.optimizer = build_optimizer(config.optimizer, module, self.optimizer_kernels == "apex", self.dtype)
        recorded = deepspeed_step.RecordedSettings(settings)
        naming = deepspeed_step.naming_option(deepspeed_extra or {}, recorded)
        quiet = contextlib.redirect_stdout(io.StringIO())  # DeepSpeed also prints without its logger
        with naming, quiet, deepspeed_step.device_as_local_rank(world):
            self._deepspeed, *_ = deepspeed.initialize(
                model=module, optimizer=self.optimizer, config=recorded, dist_init_required=False
            )
        if config.zero.stage == 0 and config.precision != "fp32":
            for parameter in module.parameters():
                parameter.grad_dtype = torch.float32  # autograd accumulates in fp32
        self.layout = find_layout(self._deepspeed.optimizer, module, world)
        segments = {master.tensor: master.segments for master in self.layout.masters}
        if config.optimizer.split_qkv:
            stacked = {f"{name}.weight": getattr(m, "matrices", ()) or (1,) for name, m in module.named_modules()}
            segments, self.optimizer.units = self.layout.units(stacked)
        alone = world.size == 1 or not self.layout.partitioned
        self.optimizer.attach(segments, None if alone else world.device, world)
        self.compute_time = ComputeTime(world.device)
        # Called after each micro-step and restored parameter, since an update may take longer than the watchdog's limit.
        self.progress: Callable[[], None] = lambda: None
        self._skipped = torch.zeros((), dtype=torch.float64, device=world.device)  # number of skipped updates
        clip = config.optimizer.clip
        self.step = deepspeed_step.GuardedStep(self._deepspeed, module, world, self.optimizer, self.layout, clip)

    # -- training ------------------------------------------------------------------------------------------------

    def enter_phase(self, config: Config) -> None:
        """Set batch sizes and rotary bases for a phase of the run, between two updates."""
        self.config = self.config.model_copy(update={"batch": config.batch, "model": config.model})
        self.accumulation = accumulation(config, self.world.size)
        self.module.cfg = config.model  # type: ignore[assignment]
        self._deepspeed.set_train_micro_batch_size(config.batch.micro_size)
        self._deepspeed.set_train_batch_size(config.batch.micro_size * self.accumulation * self.world.size)
        self._deepspeed.micro_steps = self._deepspeed.global_steps * self.accumulation

    def train_update(self, update: Any, lr: float, veto: Callable[[float], bool] | None = None) -> UpdateResult:
        """Forward and backward of every micro-batch of `update` (this rank's part), then one optimizer step.

        If `veto(loss)` is true, on every rank, the step is skipped as for non-finite gradients. This waits for the last forward
        pass.
        """
        assert len(update.batches) == self.accumulation, (len(update.batches), self.accumulation)
        random_numbers.seed_update(self.config.seed, update.step, self.world.rank, self.world.device)
        self._deepspeed.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group[RATE]
        counts = [sum(parts) for parts in zip(*map(self._counts, update.batches), strict=True)]
        totals = self._sum_over_ranks(to_device(counts, self.world.device, torch.float64))
        # DeepSpeed averages over micro-steps and ranks, so a part of the global mean is multiplied by both.
        averaged = self.accumulation * (self.world.size if self.step.deepspeed_sums else 1)
        scale = averaged / totals.clamp(min=1).float() * self._weights.float()
        terms, vetoed = len(counts), False
        sums = torch.zeros(2 * terms, dtype=torch.float64, device=self.world.device)
        seeds = self._seeds(update.step)
        for number, batch in enumerate(update.on(self.world.device)):
            last = number == self.accumulation - 1
            seed = {} if seeds is None else {"seed": seeds[number]}
            with self.compute_time:
                output = self._deepspeed(**batch.inputs(), **seed)
                sums += doubles(output).detach()
            if last:
                means = self._sum_over_ranks(sums)[:terms] / totals.clamp(min=1)
                weighted = (means * self._weights).sum()
                host_loss = HostCopy(weighted)
                vetoed = veto is not None and veto(float(host_loss))
            loss = scaled_loss(output[:terms], scale)
            with contextlib.nullcontext() if self.step.deepspeed_sums else self.compute_time:
                self.step.backward(loss, last)
            self.progress()
        norm, applied = self.step.finish(vetoed)
        self._skipped += 1 - applied
        return UpdateResult(
            loss=weighted,
            losses=means,
            correct=sums[terms:],
            counts=totals,
            grad_norm=norm,
            applied=applied,
            vetoed=vetoed,
            host_loss=host_loss,
            host_applied=HostCopy(applied),
        )

    def _seeds(self, step: int) -> Tensor | None:
        """int64 [A, 2] on the device: for each micro-step the seed of the update's dropout, and the index in the update of the
        micro-batch's first row, so that masks depend on the row. None for a module without a seed argument."""
        if not self._takes_seed:
            return None
        key, micro = random_numbers.update_seed(self.config.seed, step), self.config.batch.micro_size
        firsts = [(a * self.world.size + self.world.rank) * micro for a in range(self.accumulation)]
        values = [value for first in firsts for value in (key, first)]
        return to_device(values, self.world.device, torch.int64).view(-1, 2)

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """`tensor`, summed in place. A collective."""
        if self.world.size > 1:
            dist.all_reduce(tensor)
        return tensor

    @torch.no_grad()
    def eval_sums(self, batches: Iterable[Any], sources: int = 0) -> Tensor:
        """Sums over all ranks' batches, fp64 [3 k]: loss, correct answers and items of each term; for batches with `sources` those of
        each source follow MLM's and NSP's.

        Dropout is off. Ranks may have different numbers of batches; at stage 3, where a forward pass is a collective, each needs at
        least one (ValueError).
        """
        self._deepspeed.eval()
        sums = torch.zeros(3 * (len(self.terms) + sources), dtype=torch.float64, device=self.world.device)
        for batch, counted in self._aligned_batches(batches):
            output = self._deepspeed(**batch.to(self.world.device).inputs())
            if counted:
                sums += loss_table(output, self._counts(batch)).flatten()
        self._deepspeed.train()
        return self._sum_over_ranks(sums)

    def _aligned_batches(self, batches: Iterable[Any]) -> Iterable[tuple[Any, bool]]:
        """(batch, whether it counts) of each batch. At ZeRO stage 3, where a forward pass is a collective, a rank that
        runs out repeats its last batch, uncounted, until every rank is done."""
        world = self.world
        if self.config.zero.stage < 3 or world.size == 1:
            for batch in batches:
                yield batch, True
            return
        source, last = iter(batches), None
        while True:
            batch = next(source, None)
            left = world.sum_ints([batch is not None])[0]
            if not left:
                return
            if world.agree_any(batch is None and last is None):
                raise ValueError(
                    f"evaluation at zero.stage=3 needs a batch on each of {world.size} ranks, only {left} have one; "
                    "lower batch.micro_size, or hold out more text"
                )
            last = batch if batch is not None else last
            yield last, batch is not None

    # -- state ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Copies in host memory of this rank's part of the training state, between two updates.

        12 bytes for each element whose moments are on this rank; at stage 0, where every rank has all, for its share.
        """
        layout, world = self.layout, self.world
        masters = [master.tensor for master in layout.masters]
        moments = {n: flat for n, tensor in enumerate(masters) if (flat := self.optimizer.find_moments(tensor))}
        counters = {
            "optimizer_steps": self.optimizer.count_updates(m.tensor for m in layout.masters if m.segments),
            "deepspeed": {name: int(getattr(self._deepspeed, name)) for name in COUNTERS}
            | {"skipped_steps": self.skipped_steps},
        }
        if self.optimizer.primed and not counters["optimizer_steps"]:
            counters["primed"] = True
        return Snapshot(
            shapes={name: tuple(shape) for name, shape in layout.shapes.items()},
            weights=layout.copies(world, {n: {WEIGHT: tensor} for n, tensor in enumerate(masters)}),
            moments=layout.copies(world, moments),
            counters=counters,
        )

    @torch.no_grad()
    def restore(self, stored: Stored, counters: Mapping[str, Any]) -> None:
        """Continue from a snapshot taken by any number of ranks at any ZeRO stage. A collective.

        Raises ValueError naming the first parameter that is missing, unknown or of another shape.
        """
        check_shapes(stored.shapes, self.layout.shapes)
        updates, primed = int(counters["optimizer_steps"]), counters.get("primed", False)
        self.optimizer.resume([master.tensor for master in self.layout.masters], updates, primed)
        views: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
        for part in self.layout.slices(self.optimizer):
            for kind, view in part.values.items():
                views.setdefault((kind, part.name), []).append((part.offset, view))
        parameters = dict(self.module.named_parameters())
        for kind, name, whole in stored.gather_all(WEIGHT, *(MOMENTS if updates or primed else ())):
            for offset, view in views.pop((kind, name), ()):
                view.copy_(whole[offset : offset + view.numel()])
            self.progress()
            if kind == WEIGHT:
                self._set_parameter(parameters[name], whole)
        assert not views, f"not in the snapshot: {next(iter(views))}"
        for name in COUNTERS:
            setattr(self._deepspeed, name, int(counters["deepspeed"][name]))
        self._skipped.fill_(int(counters["deepspeed"]["skipped_steps"]))
        self._deepspeed.micro_steps = self._deepspeed.global_steps * self.accumulation

    def _set_parameter(self, parameter: Any, whole: Tensor) -> None:
        """Set the model's weight, or at stage 3 this rank's partition of it, in the model's type."""
        if parameter.numel() == whole.numel():  # empty if stage 3 partitioned it
            parameter.copy_(whole.view(parameter.shape))
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None:
            part = whole[self.world.rank * partition.ds_numel :][: partition.ds_numel]
            partition.data[: part.numel()].copy_(part)

    def consolidated_weights(self) -> dict[str, Tensor]:
        """Complete fp32 weights (the master copies) by parameter name on rank 0's CPU, {} elsewhere. A collective."""
        return self.layout.gather(self.world)

    @property
    def skipped_steps(self) -> int:
        """Updates skipped since the start of the run, kept across resumes. Waits for the device."""
        return int(self._skipped)

    def describe(self) -> str:
        """One line for the log: precision, optimizer, ZeRO, ranks, batch."""
        c = self.config
        parameters = sum(shape.numel() for shape in self.layout.shapes.values())
        return (
            f"{parameters / 1e6:.1f} M parameters, {c.precision}, {c.optimizer.name}, ZeRO-{c.zero.stage}, "
            f"{self.world.size} rank(s) on {self.world.device.type} ({self.world.launcher}), global batch "
            f"{c.batch.global_size} = {shares(c, self.world.size)}"
        )


def rank_facts(
    config: Config, settings: Mapping[str, Any], device: torch.device, model: nn.Module, optimizer: str
) -> dict[str, Any]:
    """Facts by name that must be equal on all ranks for their updates to be equal: config, versions, kernels,
    environment variables. At ZeRO stage 0, where every rank steps its own copy of the weights, also the machine."""
    facts: dict[str, Any] = flat(config.model_dump()) | environment.versions()
    facts["megabert's source"] = environment.source()
    facts |= {f"DeepSpeed's {name}": value for name, value in flat(settings).items()}
    for module in model.modules():
        if (backends := getattr(module, "backends", None)) is not None:
            facts |= {f"backend of {role}": chosen.name for role, chosen in backends._asdict().items()}
    facts |= {"kernels of ops.optimizer": optimizer, **getattr(model, "provenance", {})}
    facts |= {f"environment variable {name}": os.environ.get(name, "unset") for name in NUMERIC_VARIABLES}
    if device.type == "cuda":
        nccl: Any = torch.cuda.nccl.version()
        facts |= {"CUDA of torch": torch.version.cuda, "NCCL": nccl}
    if config.zero.stage == 0:
        cuda = device.type == "cuda"
        facts["machine at zero.stage=0"] = torch.cuda.get_device_name(device) if cuda else environment.processor()
    return facts


def _optimizer_kernels(config: Config, device: torch.device) -> str:
    """ "torch" or "apex": as `ops.optimizer` says; with auto apex if it can run. Raises ValueError if it cannot."""
    if config.ops.optimizer == "torch":
        return "torch"
    reason = apex.obstacle(config, device)
    if reason and config.ops.optimizer == "apex":
        raise ValueError(f"ops.optimizer=apex cannot run here: {reason}")
    return "torch" if reason else "apex"

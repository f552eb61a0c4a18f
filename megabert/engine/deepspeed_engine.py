"""Training engine: a model under DeepSpeed ZeRO, one call an update. The only file that knows DeepSpeed.

Losses are sums divided by the global counts of the update, so ranks x micro-steps may change without changing the
update. A module that trains here names its k losses in `terms`, says in `weights` what each counts in their sum and in
`counts(batch)` over how many items a batch sums each, and returns the k sums followed by k counts of right answers. A
non-finite loss or gradient on any rank skips the update on all ranks. An update reads nothing back from the device and
copies nothing to it from memory that is not pinned, so that the host runs ahead. Exceptions: a veto reads the loss; fp16's
loss scale and offloaded states are the host's, so there DeepSpeed reads the norm; stage 3 waits for its own side streams.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabert.common import rng
from megabert.config import Config, accumulation, merge_deepspeed, shares, to_deepspeed
from megabert.distributed.process_group import World
from megabert.engine import device_step, loss_scaler
from megabert.engine.deepspeed_import import import_deepspeed, quiet
from megabert.engine.determinism import repeat_bit_for_bit
from megabert.engine.in_step import in_step
from megabert.engine.own_time import OwnTime
from megabert.engine.precision import DTYPES, multiply_in_float8
from megabert.engine.recorded_step import RecordedMicroSteps, check_graphs
from megabert.engine.result import HostCopy, UpdateResult, doubles, loss_table, scaled_loss
from megabert.engine.snapshot import Snapshot
from megabert.engine.zero_layout import WEIGHT, Read, check_shapes, find_layout
from megabert.optim import apex_kernels, optimizers
from megabert.optim.optimizers import to_device

COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # of DeepSpeed's engine


class Engine:
    """A model under DeepSpeed ZeRO with this run's optimizer."""

    def __init__(
        self,
        config: Config,
        model: nn.Module | Callable[[], nn.Module],
        world: World,
        deepspeed_extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`model` (or what builds it) has fp32 weights; `deepspeed_extra` holds a user's further DeepSpeed keys.

        Raises ValueError naming a key of `deepspeed_extra` that contradicts the config.
        """
        if config.deterministic:
            repeat_bit_for_bit()
        deepspeed = import_deepspeed(world)
        self.config, self.world = config, world
        self.dtype = DTYPES[config.precision]
        self.accumulation = accumulation(config, world.size)
        if config.precision == "fp16" and not deepspeed.get_accelerator().is_fp16_supported():
            raise ValueError(f"precision=fp16 is not supported on this {world.device.type}; use bf16 or fp32")
        if config.cuda_graphs:
            check_graphs(config, world.size)
        extra = dict(deepspeed_extra or {})
        settings = merge_deepspeed(to_deepspeed(config, world.size), extra, "--deepspeed_config")
        module: Any = model if isinstance(model, nn.Module) else model()
        self.terms: tuple[str, ...] = module.terms
        self._weights = torch.tensor(module.weights, dtype=torch.float64, device=world.device)
        self._counts: Callable[[Any], tuple[int, ...]] = module.counts
        self._takes_seed = "seed" in inspect.signature(module.forward).parameters
        # fp16's loss scale and offloaded gradients are on the host: there the norm, the clip and the skip are DeepSpeed's.
        self._guarded = config.precision != "fp16" and config.zero.offload == "none"
        if self._guarded:
            for key, value in device_step.settings(config.zero.stage, config.precision).items():
                settings[key] = settings[key] | value if isinstance(value, dict) else value
        # What DeepSpeed 0.19.8 leaves undone at stage 0 in 16 bits is done here and in `train_update`:
        # bf16, fp16  `engine._do_optimizer_sanity_check` refuses data_types, so torch itself accumulates in fp32 (grad_dtype)
        # fp16        `engine.backward` scales the loss for ZeRO alone, so we scale it
        if stage_0 := config.zero.stage == 0:
            settings.pop("data_types", None)
        apex = config.ops.optimizer == "apex"
        if apex and (reason := apex_kernels.obstacle(config, world.device)):
            raise ValueError(f"ops.optimizer=apex cannot run here: {reason}")
        self.optimizer_kernels = "apex" if apex else "torch"
        products = torch.float32 if config.precision == "fp32" else torch.bfloat16
        self.optimizer = optimizers.build(config.optimizer, module, apex, products)
        with quiet():
            self._deepspeed, *_ = deepspeed.initialize(
                model=module, optimizer=self.optimizer, config=settings, dist_init_required=False
            )
        if config.precision == "fp8":
            multiply_in_float8(module, world.device)
        self.module: nn.Module = module
        wrapper = self._deepspeed.optimizer
        scaler: Any = getattr(wrapper, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # skips at the floor are counted as bad updates instead
        if stage_0 and config.precision != "fp32":
            for parameter in module.parameters():
                parameter.grad_dtype = torch.float32
        self.layout = find_layout(wrapper, module, world)
        segments = {master.tensor: master.segments for master in self.layout.masters}
        if config.optimizer.split_qkv:
            merged = {f"{name}.weight": getattr(m, "matrices", 0) or 1 for name, m in module.named_modules()}
            segments, units = self.layout.units(merged)
            self.optimizer.number_units(units)
        self.optimizer.attach(segments, world.device if self.layout.partitioned else None, world)
        if self._guarded:
            self._gradients = device_step.install(wrapper, module, self.layout)
        self._summed = device_step.take_gradients(self._deepspeed, module, world.size) if self._guarded else None
        # Updates the guard skipped that are not in DeepSpeed's counter yet.
        self._unapplied = torch.zeros((), device=world.device)
        self._recorded: RecordedMicroSteps | None = None
        if config.cuda_graphs:
            assert self._summed is not None
            self._recorded = RecordedMicroSteps(
                module, self._summed, len(self.terms), accumulation=self.accumulation, device=world.device
            )
        self.own_time = OwnTime(world.device)
        self._scale_loss = stage_0 and config.precision == "fp16"
        if config.precision == "fp16":
            # At every stage DeepSpeed lets the loss scale grow before it divides the gradients by it, which halves those of
            # one update in 1,000 (where clipping does not hide it). So it grows after the step.
            self._update_scale = wrapper._update_scale
            wrapper._update_scale = lambda skip: self._update_scale(True) if skip else None

    # -- training ------------------------------------------------------------------------------------------------

    def train_update(self, update: Any, lr: float, veto: Callable[[float], bool] | None = None) -> UpdateResult:
        """Forward and backward of every micro-batch of `update` (this rank's part), then one optimizer step.

        Where `veto(loss)` is true, on every rank, the step is not taken, as if gradients were not finite. It costs a wait
        for the last forward pass, and fp16 halves its loss scale.
        """
        with self._recorded.stream() if self._recorded else contextlib.nullcontext():
            return self._train_update(update, lr, veto)

    def _train_update(self, update: Any, lr: float, veto: Callable[[float], bool] | None) -> UpdateResult:
        assert len(update.batches) == self.accumulation, (len(update.batches), self.accumulation)
        rng.seed_update(self.config.seed, update.step, self.world.rank, self.world.device)
        engine, vetoed = self._deepspeed, False
        engine.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        counts = [sum(parts) for parts in zip(*map(self._counts, update.batches), strict=True)]
        totals = to_device(counts, self.world.device, torch.float64)
        if self.world.size > 1:
            dist.all_reduce(totals)
        # DeepSpeed averages over micro-steps and ranks, so a share of the global mean is scaled up by both. We sum.
        averaged = self.accumulation * (1 if self._summed else self.world.size)
        scale = averaged / totals.clamp(min=1).float() * self._weights.float()
        terms = len(counts)
        sums = torch.zeros(2 * terms, dtype=torch.float64, device=self.world.device)
        loss_scale, loss_scale_floor = loss_scaler.scale_and_floor(self._deepspeed.optimizer)
        if self._summed:
            self._summed.begin()
        seeds = self._seeds(update.step)
        for number, batch in enumerate(update.batches, 1):
            seed = {} if seeds is None else {"seed": seeds[number - 1]}
            last = number == self.accumulation
            # Sums over the ranks overlap the last backward pass, and are no part of a recording.
            recorded = None if last and self.world.size > 1 else self._recorded
            self.own_time.begin()
            if recorded:
                sums += recorded(number == 1, batch.inputs() | seed, scale)
            else:
                output = engine(**batch.to(self.world.device).inputs(), **seed)
                sums += doubles(output).detach()
            if last or not self._summed:  # DeepSpeed's backward passes wait for other ranks
                self.own_time.end()
            if last:
                if self.world.size > 1:
                    dist.all_reduce(sums)
                means = sums[:terms] / totals.clamp(min=1)
                weighted = (means * self._weights).sum()
                host_loss = HostCopy(weighted)
                vetoed = veto is not None and veto(float(host_loss))
            if not recorded:
                loss = scaled_loss(output[:terms], scale)
                if vetoed and not self._guarded:
                    loss = loss * math.nan  # DeepSpeed skips it as a bad one
                if self._summed and last:
                    self._summed.last()
                    self.own_time.begin()
                engine.backward(loss * loss_scale if self._scale_loss else loss)
            if last:
                self.own_time.end()
            if self._guarded and last:
                if self._summed:
                    self._summed.finish()
                norm = self.optimizer.guard(self._gradients(), self.config.optimizer.clip, skip=vetoed)
            engine.step()
        overflow = False
        if self._guarded:
            assert self.optimizer.found_inf is not None
            self._unapplied += self.optimizer.found_inf
            applied = 1 - self.optimizer.found_inf
        else:
            norm, skipped, overflow = self._step_by_deepspeed(sums, loss_scale, loss_scale_floor, vetoed)
            applied = sums.new_full((), not skipped, dtype=torch.float32)
        return UpdateResult(
            loss=weighted,
            losses=means,
            correct=sums[terms:],
            counts=totals,
            grad_norm=norm,
            applied=applied,
            overflow=overflow,
            vetoed=vetoed,
            host_loss=host_loss,
            host_applied=HostCopy(applied),
        )

    def _seeds(self, step: int) -> Tensor | None:
        """int64 [A, 2] on the device: for each micro-step the seed of the update's dropout, and the place in the update of
        the micro-batch's first row, so that a row's masks follow the row. None for a module that takes no seed."""
        if not self._takes_seed:
            return None
        key, micro = rng.update_seed(self.config.seed, step), self.config.batch.micro_size
        firsts = [(a * self.world.size + self.world.rank) * micro for a in range(self.accumulation)]
        values = [value for first in firsts for value in (key, first)]
        return to_device(values, self.world.device, torch.int64).view(-1, 2)

    def _step_by_deepspeed(
        self, sums: Tensor, loss_scale: float, floor: float, vetoed: bool
    ) -> tuple[Tensor, bool, bool]:
        """What came of a step that DeepSpeed decided about: the gradients' norm, whether it was skipped, and whether that
        is fp16's search for a loss scale alone."""
        fp16 = self.config.precision == "fp16"
        skipped, norm = bool(self._deepspeed.optimizer.overflow), self._deepspeed.get_global_grad_norm()
        overflow = fp16 and skipped and not vetoed and loss_scale > floor and bool(torch.isfinite(sums).all())
        if self._scale_loss and not skipped:
            norm = norm / loss_scale
        if fp16 and not skipped:
            self._update_scale(False)
        return sums.new_full((), float(norm), dtype=torch.float32), skipped, overflow

    @torch.no_grad()
    def eval_sums(self, batches: Iterable[Any]) -> Tensor:
        """Sums over all ranks' batches, fp64 [3 k]: loss, right answers and items of each term.

        Dropout is off. Ranks may hold different numbers of batches; at stage 3, where a forward pass is a collective,
        each needs at least one (ValueError).
        """
        self._deepspeed.eval()
        sums = torch.zeros(3 * len(self.terms), dtype=torch.float64, device=self.world.device)
        for batch, counted in in_step(batches, self.world, self.config.zero.stage):
            output = self._deepspeed(**batch.to(self.world.device).inputs())
            if counted:
                sums += loss_table(output, self._counts(batch)).flatten()
        self._deepspeed.train()
        if self.world.size > 1:
            dist.all_reduce(sums)
        return sums

    # -- state ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Copies in host memory of what this rank saves of the training state, between two updates.

        That is 12 bytes an element of those whose moments it holds; at stage 0, where every rank holds all, of its share.
        """
        layout, world = self.layout, self.world
        masters = [master.tensor for master in layout.masters]
        moments = {n: flat for n, tensor in enumerate(masters) if (flat := self.optimizer.moments_of(tensor))}
        scaler = loss_scaler.of(self._deepspeed.optimizer) if self.config.precision == "fp16" else None
        counters = {
            "optimizer_steps": self.optimizer.updates_of(m.tensor for m in layout.masters if m.segments),
            "deepspeed": {name: int(getattr(self._deepspeed, name)) for name in COUNTERS}
            | {"skipped_steps": self.skipped_steps},
            "loss_scale": {name: getattr(scaler, name) for name in loss_scaler.STATE if hasattr(scaler, name)},
        }
        if self.optimizer.primed and not counters["optimizer_steps"]:
            counters["primed"] = True
        return Snapshot(
            shapes={name: tuple(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)},
            weights=layout.copies(world, {n: {WEIGHT: tensor} for n, tensor in enumerate(masters)}),
            moments=layout.copies(world, moments),
            counters=counters,
        )

    @torch.no_grad()
    def restore(self, read: Read, shapes: Mapping[str, Sequence[int]], counters: Mapping[str, Any]) -> None:
        """Continue from a snapshot taken by any number of ranks at any ZeRO stage.

        `read` gives stretches of its parameters, which have these `shapes`. Raises ValueError naming the first parameter that
        is missing, unknown or of another shape.
        """
        check_shapes(shapes, self._shapes)
        self._read_weights(read)
        self._read_moments(read, int(counters["optimizer_steps"]), counters.get("primed", False))
        for name in COUNTERS:
            setattr(self._deepspeed, name, int(counters["deepspeed"][name]))
        self._unapplied.zero_()
        self._deepspeed.micro_steps = self._deepspeed.global_steps * self.accumulation
        scaler = loss_scaler.of(self._deepspeed.optimizer)
        for name, value in counters["loss_scale"].items():
            if name in loss_scaler.STATE and hasattr(scaler, name):  # stage 0 has no hysteresis
                setattr(scaler, name, value)

    @torch.no_grad()
    def take_moments(self, read: Read) -> None:
        """Begin with the moments of another run; their correction for a start at zero, which counts updates, begins anew."""
        self._read_moments(read, updates=0, primed=True)

    def _read_moments(self, read: Read, updates: int, primed: bool) -> None:
        self.optimizer.resume([master.tensor for master in self.layout.masters], updates, primed)
        for piece in self.layout.moments(self.optimizer):
            for kind, view in piece.values.items():
                read(kind, piece.name, piece.offset, view)

    def _read_weights(self, read: Read) -> None:
        """Fill the masters and the model's own weights, one parameter at a time in host memory."""
        self.layout.load(read, WEIGHT)
        for name, parameter in self.module.named_parameters():
            size = self._shapes[name].numel()
            if parameter.numel() == size:  # stage 3 leaves an empty tensor where it partitioned
                whole = torch.empty(size, dtype=torch.float32)
                read(WEIGHT, name, 0, whole)
                parameter.copy_(whole.view(parameter.shape))
            partition = getattr(parameter, "ds_tensor", None)
            if partition is not None:
                begin = self.world.rank * partition.ds_numel
                part = torch.empty(max(0, min(partition.ds_numel, size - begin)), dtype=torch.float32)
                read(WEIGHT, name, begin, part)
                partition.data[: part.numel()].copy_(part)

    @property
    def _shapes(self) -> dict[str, torch.Size]:
        return dict(zip(self.layout.names, self.layout.shapes, strict=True))

    def consolidated_weights(self) -> dict[str, Tensor]:
        """Whole fp32 weights (the master copies) by parameter name on rank 0's CPU, {} elsewhere. A collective."""
        return self.layout.gather(self.world)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set every weight (model and fp32 masters) from whole tensors; moments are left as they are.

        Raises ValueError naming the first parameter that is missing, unknown or of another shape.
        """
        check_shapes({name: weight.shape for name, weight in weights.items()}, self._shapes)

        def read(kind: str, name: str, offset: int, into: Tensor) -> None:
            into.copy_(weights[name].reshape(-1)[offset : offset + into.numel()])

        self._read_weights(read)

    @property
    def skipped_steps(self) -> int:
        """Updates skipped since the start of the run, kept across resumes. Waits for the device."""
        self._deepspeed.skipped_steps += int(self._unapplied)
        self._unapplied.zero_()
        return int(self._deepspeed.skipped_steps)

    def describe(self) -> str:
        """One line for the log: precision, optimizer, ZeRO, ranks, batch."""
        c = self.config
        parameters = sum(shape.numel() for shape in self.layout.shapes)
        offload = " with CPU offload" if c.zero.offload == "cpu" else ""
        return (
            f"{parameters / 1e6:.1f} M parameters, {c.precision}, {c.optimizer.name}, ZeRO-{c.zero.stage}{offload}, "
            f"{self.world.size} rank(s) on {self.world.device.type} ({self.world.launcher}), global batch "
            f"{c.batch.global_size} = {shares(c, self.world.size)}"
        )

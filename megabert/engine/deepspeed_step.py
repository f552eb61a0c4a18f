"""What we change in DeepSpeed 0.19, and why: its waits for the device, and its sums of gradients in bf16.

The step. To skip and clip on the host DeepSpeed's steps wait for the gradient norm once or more an update, at stage 0 in 16 bits once a
parameter. Here its wrapper passes gradients to the optimizer's guard, which clips and skips on the device, and masters to the
optimizer. It still sums the gradients over the ranks (except for stage 1 in bf16), copies masters into the model and gathers
partitions.

The gradients of stage 1 in bf16. DeepSpeed's wrapper converts all gradients after each backward pass, averages them after the last one
in bf16, and gives every rank all of them. Here a gradient is added to its group's flat fp32 tensor as soon as autograd has it (the
first one of an update is copied, so that nothing has to be zeroed), and a bucket of the tensor is summed in fp32 on the rank that needs
it as soon as the last micro-step has filled it. This sends as many bytes as an all-reduce in bf16.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from megabert.common.arguments import nearest
from megabert.config import Config, merge_deepspeed, to_deepspeed
from megabert.distributed.ranks import World, wait_for_ranks
from megabert.engine.zero_layout import ZeroLayout
from megabert.optim.guarded import GuardedOptimizer

# DeepSpeed's wrappers whose step is replaced here, with the beginning of the SHA-256 of the class's source in 0.19.8. In another
# source the steps omitted here, or done by the called methods, may differ.
KNOWN_WRAPPERS = {
    "BF16_Optimizer": "0833d4d1524de3a8",
    "FP16_UnfusedOptimizer": "2cd35bc5b6266aaf",
    "DeepSpeedZeroOptimizer_Stage3": "65a01ec0fd82858b",
}
BUCKET = 25_000_000  # most elements summed at once: 100 MB, a millisecond of NVLink
# Smallest part of a rank in elements; below it latency costs more than bandwidth, so gradients are all-reduced.
LEAST = 1_000_000


def import_deepspeed(world: World) -> Any:
    """Import DeepSpeed without its log messages, and without loading or compiling unused parts.

    On the CPU its shared-memory collective, used only for inference, takes a minute to compile on a fresh machine. MLflow is for
    tuning, takes longer to load than all of DeepSpeed, and starts a thread. Its Muon is imported with ZeRO and decorated with
    torch.compile, which would load the compiler. When its engine starts it collects garbage several times, which takes a second in
    all with the objects of the imported modules: these are frozen.
    """
    first = "deepspeed" not in sys.modules
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    hidden = {} if "mlflow" in sys.modules else {"mlflow": None}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        import deepspeed
    finally:
        for name in hidden:
            del sys.modules[name]
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    communication.build_shm_op = lambda: None
    compile_, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    compiler.compile = compile_
    if first:
        gc.freeze()
    return deepspeed


@contextlib.contextmanager
def device_as_local_rank(world: World) -> Iterator[None]:
    """In the block the environment's local rank is the index of this rank's GPU: DeepSpeed selects the GPU of that number, and a rank
    that sees only its own (`srun --gpus-per-task=1`) has no other than 0."""
    names = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"}  # which DeepSpeed compares
    before = {name: os.environ[name] for name in names & os.environ.keys()}
    number = world.local_rank if world.device.index is None else world.device.index
    os.environ.update(dict.fromkeys(before, str(number)))
    try:
        yield
    finally:
        os.environ.update(before)


def settings(config: Config, world_size: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration, without features that read gradients on the host. Raises ValueError naming a key of `extra` that
    contradicts the run's configuration."""
    merged = merge_deepspeed(to_deepspeed(config, world_size), dict(extra), "--deepspeed_config")
    stage, precision = config.zero.stage, config.precision
    merged["gradient_clipping"] = 0.0
    if stage == 2 or (stage == 1 and precision == "fp32"):
        merged["zero_optimization"] = merged["zero_optimization"] | {"compute_grad_norm": False}
        if precision != "fp32":
            merged["bf16"] = merged["bf16"] | {"check_grad_overflow": False}
    if stage == 0 and precision != "fp32":
        # `engine._do_optimizer_sanity_check` refuses it at stage 0, where torch itself accumulates in fp32 (grad_dtype).
        merged.pop("data_types", None)
    return merged


class RecordedSettings(dict[str, Any]):
    """DeepSpeed's configuration with the names of the keys that DeepSpeed looked up, since it has no list of those it knows. A copy
    shares them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.read: set[object] = set()

    def __contains__(self, key: object) -> bool:
        self.read.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@contextlib.contextmanager
def naming_option(extra: Mapping[str, Any], settings: RecordedSettings) -> Iterator[None]:
    """Raises what DeepSpeed says of a user's settings as a ValueError naming their option, and for a key of theirs that it did not read
    in the block."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    kinds = DeepSpeedConfigError, AssertionError, AttributeError, KeyError, NotImplementedError, TypeError, ValueError
    try:
        yield
    except kinds as error:
        if not extra:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ValidationError):
            text = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError(f"--deepspeed_config: DeepSpeed refuses it ({text:.300})") from error
    for key in extra.keys() - settings.read:
        raise ValueError(f"--deepspeed_config: DeepSpeed has no {key}{nearest(key, map(str, settings.read))}")


class GuardedStep:
    """A step without reads from the device: the optimizer's guard clips and skips there."""

    def __init__(
        self, engine: Any, module: nn.Module, world: World, optimizer: GuardedOptimizer, layout: ZeroLayout, clip: float
    ) -> None:
        """Modifies DeepSpeed's `engine` and its wrapper of `optimizer`."""
        self._engine, self._optimizer, self._clip = engine, optimizer, clip
        self.gradients = replace_step(engine.optimizer, module, layout)
        self.flat: FlatGradients | None = None  # None if DeepSpeed sums gradients over the ranks
        wrapper = engine.optimizer
        if hasattr(wrapper, "fp32_groups_flat_partition"):  # stage 1 in bf16
            wrapper.immediate_grad_update = True  # it leaves the sums to hooks, here those of FlatGradients
            wrapper.zero_grad = lambda *args, **kwargs: None
            engine.enable_backward_allreduce = False
            groups = zip(wrapper.fp32_groups_gradients_flat, wrapper.bf16_groups, strict=True)
            self.flat = FlatGradients(list(groups), list(module.parameters()), world.size)

    @property
    def deepspeed_sums(self) -> bool:
        """Whether DeepSpeed sums gradients over the ranks in its backward passes, where it waits for them, and divides by their
        number."""
        return self.flat is None

    def backward(self, loss: Tensor, last: bool) -> None:
        if self.flat is not None and last:
            self.flat.last()
        self._engine.backward(loss)
        if not last:
            self._engine.step()  # which only counts micro-steps

    def finish(self, vetoed: bool) -> tuple[Tensor, Tensor]:
        """Take the step; returns `grad_norm` and `applied` of `UpdateResult`. A collective."""
        if self.flat is not None:
            self.flat.finish()
        norm = self._optimizer.guard(self.gradients(), self._clip, skip=vetoed)
        self._engine.step()
        return norm, 1 - self._optimizer.found_inf


def replace_step(wrapper: Any, module: nn.Module, layout: ZeroLayout) -> Callable[[], list[Tensor]]:
    """Replace `wrapper.step` if it reads from the device; returns a function that lists this rank's gradients before a step.

    Over the ranks of a partitioned layout the lists have each element once, and padding, which is zero. Stages 1 and 2 with flat
    partitions do not compute norm and overflow when `settings` disables them.
    """
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # stage 3
        check_known(type(wrapper))
        wrapper.step = lambda closure=None: _step_stage_3(wrapper)
    if hasattr(wrapper, "averaged_gradients"):  # stages 1 to 3
        return lambda: [g for group in wrapper.averaged_gradients.values() for g in group]
    if hasattr(wrapper, "fp32_groups_flat_partition"):  # stage 1 in bf16 with fp32 gradients
        check_known(type(wrapper))
        wrapper.step = lambda closure=None: _step_stage_1(wrapper)
        parts = zip(layout.masters, wrapper.fp32_groups_gradient_flat_partition, strict=True)
        views = [flat[segment.start : segment.end] for master, flat in parts for segment in master.segments]
        return lambda: views
    if hasattr(wrapper, "fp32_groups"):  # stage 0 in 16 bits
        check_known(type(wrapper))
        wrapper.step = lambda closure=None: _step_stage_0(wrapper)
    return lambda: [p.grad for p in module.parameters() if p.grad is not None]


def check_known(wrapper: type) -> None:
    """Raises ValueError naming the class of a wrapper that differs from the one whose step is replaced here."""
    digest = hashlib.sha256(inspect.getsource(wrapper).encode()).hexdigest()
    known = KNOWN_WRAPPERS.get(wrapper.__name__)
    if known is None or not digest.startswith(known):
        raise ValueError(
            f"{wrapper.__module__}.{wrapper.__name__} of DeepSpeed {metadata.version('deepspeed')} is not the one whose step is "
            "replaced here; install deepspeed==0.19.8"
        )


@torch.no_grad()
def _step_stage_0(wrapper: Any) -> None:
    masters = [master for group in wrapper.fp32_groups for master in group]
    parameters = [parameter for group in wrapper.fp16_groups for parameter in group]
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = parameter.grad  # fp32 already (grad_dtype), so no copy
    wrapper.optimizer.step()
    torch._foreach_copy_(parameters, masters)
    for master in masters:
        master.grad = None


@torch.no_grad()
def _step_stage_1(wrapper: Any) -> None:
    partitions = wrapper.fp32_groups_gradient_flat_partition
    for master, gradient in zip(wrapper.fp32_groups_flat_partition, partitions, strict=True):
        master.grad = gradient
    wrapper.optimizer.step()
    wrapper.update_lp_params()


@torch.no_grad()
def _step_stage_3(wrapper: Any) -> None:
    timers: set[str] = set()
    wrapper._pre_step()
    wrapper._partition_all_parameters()
    wrapper.zero_grad(set_to_none=True)
    for group in range(len(wrapper.fp16_groups)):
        wrapper._prepare_sub_group(group, timers)
        wrapper._optimizer_step(group)
        wrapper._reassign_or_swap_out_partitioned_parameters(group)
        wrapper._release_sub_group(group, timers)
    wrapper._post_step(timers)


@dataclass
class GradientBucket:
    """A slice of a flat gradient, the rank that needs its sum (-1: every one), and the parameters in it."""

    flat: Tensor
    owner: int
    members: frozenset[int]  # indices of parameters in the order of the model
    waiting: int = 0  # number of these whose gradient the last micro-step has not computed yet


class FlatGradients:
    """The flat fp32 gradients of groups of parameters, filled by hooks on the parameters."""

    def __init__(
        self, groups: Sequence[tuple[Tensor, Sequence[nn.Parameter]]], order: Sequence[nn.Parameter], world: int
    ) -> None:
        """`groups`: a flat tensor, whose `world` equal parts belong to the ranks, and the parameters concatenated in it. `order`: all
        parameters in the order of the forward pass."""
        number = {id(parameter): n for n, parameter in enumerate(order)}
        self._views: dict[int, Tensor] = {}
        self._buckets: list[GradientBucket] = []
        for flat, parameters in groups:
            ends, position = [], 0
            for parameter in parameters:
                begin, position = position, position + parameter.numel()
                n = number[id(parameter)]
                self._views[n] = flat[begin:position].view(parameter.shape)
                ends.append((n, begin, position))
                parameter.register_post_accumulate_grad_hook(lambda p, n=n: self._arrived(n, p))
            for begin, end, owner in bucket_bounds(flat.numel(), world) if world > 1 else ():
                members = frozenset(n for n, first, last in ends if first < end and begin < last)
                self._buckets.append(GradientBucket(flat[begin:end], owner, members))
        # The backward pass reaches the last layer first. All ranks sum in this order, even if a bucket is ready earlier.
        self._buckets.sort(key=lambda bucket: -min(bucket.members, default=-1))
        self._in = {n: [bucket for bucket in self._buckets if n in bucket.members] for n in self._views}
        self._reset()

    def _reset(self) -> None:
        self._filled: set[int] = set()
        self._last, self._launched = False, 0
        self._works: list[Any] = []
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)

    def last(self) -> None:
        """Announce the last backward pass of the update. A collective, with `finish`."""
        self._last = True

    def finish(self) -> None:
        """Complete the sums, for work queued on the device after this call; the next update overwrites them. Parameters without a
        gradient have 0."""
        for n, view in self._views.items():
            if n not in self._filled:
                view.zero_()
        self._launch(len(self._buckets))
        for work in self._works:
            wait_for_ranks(work)
        self._reset()

    @torch.no_grad()
    def _arrived(self, n: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if n in self._filled:
            self._views[n].add_(parameter.grad)
        else:
            self._views[n].copy_(parameter.grad)
            self._filled.add(n)
        parameter.grad = None
        if self._last:
            for bucket in self._in[n]:
                bucket.waiting -= 1
                assert bucket.waiting >= 0, "a parameter had two gradients in one backward pass"
            ready = self._launched
            while ready < len(self._buckets) and not self._buckets[ready].waiting:
                ready += 1
            self._launch(ready)

    def _launch(self, until: int) -> None:
        for bucket in self._buckets[self._launched : until]:
            if bucket.owner < 0:
                self._works.append(dist.all_reduce(bucket.flat, async_op=True))
            else:
                self._works.append(dist.reduce(bucket.flat, dst=bucket.owner, async_op=True))
        self._launched = until


def bucket_bounds(size: int, world: int) -> list[tuple[int, int, int]]:
    """(begin, end, owner) of the buckets of a flat tensor whose `world` equal parts belong to the ranks."""
    part = size // world
    if part < LEAST:
        return [(begin, min(begin + BUCKET, size), -1) for begin in range(0, size, BUCKET)]
    return [
        (begin, min(begin + BUCKET, (rank + 1) * part), rank)
        for rank in range(world)
        for begin in range(rank * part, (rank + 1) * part, BUCKET)
    ]

"""Forward and backward of a micro-step, recorded once and replayed on inputs of fixed addresses: a CUDA graph.

What a recording needs is kept here, whatever the device: the step reads its inputs from buffers that never move, each
batch is copied into them, shapes never change, and nothing is read back. On the CPU a replay runs the step again on the
same buffers, so that all of this is tested there. On a GPU it has not been run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megabert.config import Config, accumulation
from megabert.engine.gradients import Gradients
from megabert.engine.result import doubles, scaled_loss

WARM_UP = 3  # runs before a recording, as torch's documentation asks for: lazy initialisation, autotuning

Step = Callable[[str, Mapping[str, Tensor]], Tensor]  # kind of step, inputs -> what it gives


class RecordedStep:
    """`step` of each of `kinds`, recorded at the first call and replayed from then on.

    The first kind must not depend on what a step before it left, so that it can be run to warm up; a recording runs nothing.
    On CUDA all calls have to be made on one stream that is not the default one, on which the module ran from the beginning.
    """

    def __init__(self, step: Step, kinds: Sequence[str], device: torch.device) -> None:
        self._step, self._kinds, self._device = step, tuple(kinds), device
        self._replays: dict[str, Callable[[], Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, kind: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """What the step gives for `inputs`, on any device; it is there until the next call.

        Raises ValueError when the inputs differ in name, shape or type from the first ones.
        """
        self._fill(inputs)
        if not self._replays:
            if self._device.type == "cuda":
                self._record()
            else:
                self._replays = {each: partial(self._step, each, self.buffers) for each in self._kinds}
        return self._replays[kind]()

    def _fill(self, inputs: Mapping[str, Tensor]) -> None:
        for name, value in inputs.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"cuda_graphs: the input {name} is no tensor, so a recording would keep its first value"
                )
        if not self.buffers:
            self.buffers = {name: torch.empty_like(v, device=self._device) for name, v in inputs.items()}
        given, held = ({n: (tuple(v.shape), v.dtype) for n, v in of.items()} for of in (inputs, self.buffers))
        if given != held:
            name = next(n for n in {**held, **given} if held.get(n) != given.get(n))
            raise ValueError(
                f"cuda_graphs: the input {name} is {given.get(name)} and was recorded as {held.get(name)}; "
                "batches of one shape are needed, so set cuda_graphs=false"
            )
        for name, buffer in self.buffers.items():
            buffer.copy_(inputs[name], non_blocking=True)

    def _record(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        assert stream != torch.cuda.default_stream(self._device), "autograd would wait for the default stream"
        drawn = torch.cuda.get_rng_state(self._device)
        for _ in range(WARM_UP):
            self._step(self._kinds[0], self.buffers)
        pool = torch.cuda.graph_pool_handle()
        for kind in self._kinds:
            graph = torch.cuda.CUDAGraph()
            # thread_local: what NCCL's and the loader's threads call meanwhile is no part of the recording.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = self._step(kind, self.buffers)
            self._replays[kind] = partial(_replay, graph, result)
        torch.cuda.set_rng_state(drawn, self._device)


def _replay(graph: torch.cuda.CUDAGraph, result: Tensor) -> Tensor:
    graph.replay()
    return result


class RecordedMicroSteps:
    """Micro-steps of the engine at stage 1 in bf16, past DeepSpeed, which has nothing to do there but to count them."""

    def __init__(
        self, module: nn.Module, gradients: Gradients, terms: int, *, accumulation: int, device: torch.device
    ) -> None:
        """`module` gives `terms` loss sums and as many counts of right answers."""
        self._module, self._gradients, self._terms = module, gradients, terms
        self._accumulation, self._device = accumulation, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.recorded = RecordedStep(self._step, ("first", "later"), device)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """All of an update is queued on one stream of its own, where there are streams."""
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def __call__(self, first: bool, inputs: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Sums of a micro-step, fp64 [2 terms]; `first`: of its update. `scale` is each loss's factor."""
        given = dict(inputs) | {"scale": scale}
        sums = self.recorded("first" if first else "later", given)
        self._gradients.filled()
        return sums

    def _step(self, kind: str, inputs: Mapping[str, Tensor]) -> Tensor:
        if kind == "first":
            self._gradients.begin()
        else:
            self._gradients.filled()
        given = dict(inputs)
        scale = given.pop("scale")
        output = self._module(**given)
        (scaled_loss(output[: self._terms], scale) / self._accumulation).backward()
        return doubles(output).detach()


def check_graphs(config: Config, world_size: int) -> None:
    """Raises ValueError where `cuda_graphs` cannot be: under another stage or type DeepSpeed moves the gradients."""
    found = {"zero.stage": config.zero.stage, "precision": config.precision, "zero.offload": config.zero.offload}
    for key, needed in (("zero.stage", 1), ("precision", "bf16"), ("zero.offload", "none")):
        if found[key] != needed:
            raise ValueError(
                f"cuda_graphs=true needs {key}={needed}, and this run has {found[key]}; set cuda_graphs=false"
            )
    if world_size > 1 and accumulation(config, world_size) == 1:
        raise ValueError(
            "cuda_graphs=true records all micro-steps of an update but the last one, during which the ranks' gradients are "
            "summed; this run has one an update, so set cuda_graphs=false or a smaller batch.micro_size"
        )

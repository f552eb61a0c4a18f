"""Counter of what makes a host wait for a device, on CPU tensors: reads, copies to the host, synchronisations.

A CPU tensor stands for one on the device, so every read counts, also one of a tensor that on CUDA would be the host's.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
OPERATIONS = {  # each has a result that the host needs
    aten._local_scalar_dense,  # .item(), float(), bool(), if
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.repeat_interleave,
    aten.bincount,
}
METHODS = ("tolist", "cpu")  # no operations where the tensor is on the CPU; `numpy` refuses one on a device


class HostReads(TorchDispatchMode):
    """While entered: `found` counts waits by what they are and where, as `bool or float in engine.py:step`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in OPERATIONS:
            self.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def add(self, what: str) -> None:
        frames = traceback.extract_stack()
        inside = [f for f in frames if "/torch/" not in f.filename and "host_reads" not in f.filename]
        self.found[f"{what} in {inside[-1].filename.rsplit('/', 1)[-1]}:{inside[-1].name}"] += 1

    def __enter__(self) -> HostReads:
        self._undo = contextlib.ExitStack()
        for name in METHODS:
            self._replace(torch.Tensor, name, lambda *args, **kwargs: True)
        for name in ("tensor", "as_tensor"):  # host numbers copied from memory that is not pinned
            self._replace(torch, name, lambda *args, **kwargs: kwargs.get("device") is not None)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._undo.close()

    def _replace(self, owner: Any, name: str, counts: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, **kwargs):
                self.add(name)
            return original(*args, **kwargs)

        setattr(owner, name, counted)
        self._undo.callback(setattr, owner, name, original)


class Queue:
    """What DeepSpeed takes for a stream or an event of a device."""

    def __init__(self, reads: HostReads) -> None:
        self._reads = reads

    def synchronize(self) -> None:
        self._reads.add("synchronize")

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, other: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def query(self) -> bool:
        return False


def pretend_device(reads: HostReads) -> None:
    """DeepSpeed takes this process' CPU for a device with streams from here on; what it waits for is counted."""
    from deepspeed.accelerator import get_accelerator

    @contextlib.contextmanager
    def stream(queue: Any) -> Iterator[None]:
        yield

    made = {
        name: lambda *args, **kwargs: Queue(reads) for name in ("Stream", "Event", "current_stream", "default_stream")
    }
    answers = {
        name: lambda self: False for name in ("is_synchronized_device", "resolves_data_dependency", "use_host_timers")
    }
    kind = type(get_accelerator())
    for name, value in made.items():
        setattr(kind, name, property(lambda self, value=value: value))
    for name, value in answers.items():
        setattr(kind, name, value)
    kind.stream = lambda self, queue: stream(queue)
    kind.synchronize = lambda self, *args: reads.add("synchronize")
    torch.Tensor.record_stream = lambda self, queue: None  # type: ignore[method-assign, assignment]

"""BERT-LARGE's whole training step on a device: backends, batch, dropout, optimizer, compiled, graphed, FP8.

A setup is built once and measured at several shapes. The step is the trainer's own (`Engine.train_update` under DeepSpeed);
where DeepSpeed is missing or fails, a plain torch loop with the same model, optimizer, clipping and fp32 masters, which the
result says. Rows come from a real dataset, their batches are made before the clock starts, and each update is timed by
events without waiting for it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.measure import quantiles, synchronise
from benchmarks.gpu.library import healthy
from benchmarks.gpu.plan import OURS, WITHOUT_DROPOUT
from benchmarks.gpu.runner import Absent, Journal
from megabert import config as configuration
from megabert import ops
from megabert.common.malloc import keep_freed_memory
from megabert.config import Config
from megabert.data.loader import Loader, Update
from megabert.data.masking import Vocabulary
from megabert.data.shards import Dataset
from megabert.distributed import process_group
from megabert.engine import DTYPES, Engine
from megabert.metrics import datasheet_tflops, training_flops
from megabert.model import BertForPreTraining, Layer
from megabert.optim.build import build_optimizer

LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "max_positions": 512}
SMALL = {"layers": 3, "hidden": 64, "heads": 2, "max_positions": 512}
LR = 1e-5  # small: what is measured stays near its random start
BATCHES = 4  # different updates that are taken in turn
WARM_UP = 3
TRAINER = "trainer's step under DeepSpeed"
GRAPHS = 16  # of the compiled layer: two row lengths, the last layer's own, numbers of sequences that differ


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is built for a measurement. backends: `best` (the fastest candidates found), `ours`, `torch`."""

    backends: str = "best"
    precision: str = "bf16"
    optimizer: str = "adamw"
    dropout: float = 0.1
    compiled: bool = False
    graphed: bool = False
    plain: bool = False  # the plain loop, although DeepSpeed is there

    @property
    def name(self) -> str:
        words = [self.backends, self.precision, self.optimizer, f"dropout {self.dropout:g}"]
        words += [name for name in ("compiled", "graphed", "plain") if getattr(self, name)]
        return " ".join(words)

    @property
    def special(self) -> bool:
        """What only the trainer's step has, so that it may be this that fails, and not DeepSpeed."""
        return self.graphed or self.precision == "fp8"


class Plain:
    """A training loop as torch users write it: compute weights, fp32 masters, and our optimizer over the masters."""

    def __init__(self, cfg: Config, build_model: Callable[[], BertForPreTraining]) -> None:
        masters, self.model = build_model(), build_model().to(DTYPES[cfg.precision])
        self.masters: list[torch.Tensor] = list(masters.parameters())
        self.weights: list[torch.Tensor] = list(self.model.parameters())
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        self.optimizer = build_optimizer(cfg.optimizer, masters, dtype=DTYPES[cfg.precision])
        self.clip = cfg.optimizer.clip
        self.optimizer.attach()

    def train_update(self, update: Update, lr: float) -> torch.Tensor:
        """One update of one micro-batch; its loss, as a tensor on the device."""
        (batch,) = update.batches
        output = self.model(**batch.to(self.weights[0].device).inputs())
        terms = zip(output[:2], self.model.counts(batch), strict=True)
        loss = torch.stack([value / max(1, count) for value, count in terms]).sum()
        loss.backward()
        torch._foreach_copy_(self.gradients, [w.grad for w in self.weights if w.grad is not None])
        for weight in self.weights:
            weight.grad = None
        self.step()
        return loss.detach()

    def step(self) -> None:
        """Norm and clip of the masters' gradients, the update, and the weights from the masters."""
        self.optimizer.guard(self.gradients, self.clip)  # nothing is read back
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)


class Live:
    """The setup that is built at the moment, so that the next item need not build it again."""

    cfg: Config

    def __init__(self) -> None:
        self.key: tuple[Any, ...] = ()
        self.engine: Any = None
        self.kind = ""
        self.notes: dict[str, str] = {}
        self.trouble = ""  # why DeepSpeed is not used; once said it stays

    def release(self) -> None:
        self.key, self.engine, self.kind = (), None, ""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


LIVE = Live()


def allocations_refused() -> int:
    """How many allocations this process's GPU has refused for want of memory; 0 without one."""
    return torch.cuda.memory_stats().get("num_ooms", 0)


def out_of_memory(error: BaseException, refused: int) -> bool:
    """Whether an error is of GPU memory, of which `allocations_refused` was `refused` before.

    A native operation's is a RuntimeError: an error's type does not pass through torch's stable ABI.
    """
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and allocations_refused() > refused
    )


def chosen(setup: Setup, device: str, seq_len: int, journal: str) -> tuple[dict[str, str], dict[str, str]]:
    """(backend of each role, why it is not the one that was meant, where it is not)."""
    results = Journal(Path(journal)).results()
    rows = [r | {"key": key} for key, r in results.items() if key.startswith("operations/")]
    found, notes = {}, {}
    for role, own in OURS.items():
        usual = {"attention": "varlen" if device == "cuda" else "sdpa"}.get(role, "torch")
        of_role = [r for r in rows if r["key"].split("/")[1].split(" ")[0] == role]
        failed = next((r for r in of_role if r["key"].split(" ")[1] == own and r["state"] == "failed"), None)
        obstacle = ops.obstacles(role, device, torch.bfloat16)[own]
        ours = usual if obstacle or failed else own
        if setup.backends == "torch":
            found[role] = usual
            continue
        if failed:
            notes[role] = f"{failed['key']} failed: {failed.get('reason', '')[:200]}"
        elif obstacle:
            notes[role] = obstacle
        timed = [
            r["value"]
            for r in of_role
            if r["state"] == "done"
            and r["value"]["dropout"] == (0.0 if role in WITHOUT_DROPOUT else setup.dropout)
            and (r["value"]["seq_len"] == seq_len or role != "attention")  # the others work token by token
        ]
        fastest = min(timed, key=lambda value: value["ms"], default=None)
        found[role] = fastest["name"] if fastest and setup.backends == "best" else ours
    return found, notes


def make_config(setup: Setup, backends: dict[str, str], rows: int, vocabulary: int, small: bool) -> Config:
    """Raises Absent for what this revision's configuration does not know."""
    model: dict[str, Any] = (SMALL if small else LARGE) | {"vocab_size": vocabulary}
    model |= {"dropout": setup.dropout, "attention_dropout": setup.dropout}
    tree: dict[str, Any] = {
        "model": model, "precision": setup.precision, "batch": {"micro_size": rows, "global_size": rows},
        "optimizer": {"name": setup.optimizer, "lr": LR}, "schedule": {"name": "constant", "warmup_steps": 0},
        "zero": {"stage": 1}, "ops": backends,
    }  # fmt: skip
    if setup.graphed:
        tree["cuda_graphs"] = True
    try:
        return configuration.from_dict(tree)
    except ValueError as error:
        raise Absent(f"not in this revision: {error}") from error


def build(setup: Setup, device: str, seq_len: int, rows: int, vocabulary: int, small: bool, journal: str) -> None:
    """Makes `LIVE` the setup, with its model on the device from the start."""
    backends, notes = chosen(setup, device, seq_len, journal)
    key = (setup, tuple(backends.items()), rows if setup.graphed else 0, seq_len if setup.graphed else 0)
    if key == LIVE.key:
        return
    LIVE.release()
    cfg, where = make_config(setup, backends, rows, vocabulary, small), torch.device(device)
    LIVE.trouble = LIVE.trouble or broken_before(journal)

    def module() -> BertForPreTraining:
        with where:  # drawn on the device
            torch.manual_seed(cfg.seed)
            made = BertForPreTraining(cfg.model, cfg.ops, where.type, DTYPES[cfg.precision])
        if setup.compiled:  # a CPU shows only that the step can be traced
            compile_layers(made, "inductor" if device == "cuda" else "aot_eager")
        return made

    engine: Any = None
    refused = allocations_refused()
    if not setup.plain and not LIVE.trouble:
        try:
            engine, kind = Engine(cfg, module, process_group.init(process_group.discover({}))), TRAINER
        except ValueError as error:
            raise Absent(f"this revision refuses it: {error}") from error
        except (ImportError, RuntimeError, OSError, AttributeError) as error:
            if setup.special or out_of_memory(error, refused) or not healthy(device):
                raise
            LIVE.trouble = f"{type(error).__name__}: {error}"[:500]
    if engine is None:
        if setup.special:
            raise Absent(f"the plain loop has it not, and DeepSpeed is not used: {LIVE.trouble}")
        engine = Plain(cfg, module)
        kind = "plain torch loop" + (f"; DeepSpeed is not used: {LIVE.trouble}" if LIVE.trouble else "")
    LIVE.key, LIVE.cfg, LIVE.engine, LIVE.kind, LIVE.notes = key, cfg, engine, kind, notes


def compile_layers(model: BertForPreTraining, backend: Any) -> None:
    """Makes all layers run one compiled code, of as many graphs as there are shapes; one too many raises, and none runs
    eagerly unsaid.

    A graph holds the Python numbers that it was made for. Of these the layers differ by the number of their dropout masks
    alone, which torch's own backends do not read on CUDA, so that these get the same one.
    """
    import torch._dynamo

    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS)
    limits.fail_on_recompile_limit_hit = True
    compiled: Any = torch.compile(Layer.forward, dynamic=False, backend=backend)
    numbered = any(choice.name in ("native", "fused_softmax") for choice in model.backends)

    def forward(layer: torch.nn.Module, normed: Any, x: Any, bounds: Any, seed: Any, stream: int, *others: Any) -> Any:
        return compiled(layer, normed, x, bounds, seed, stream if numbered else 0, *others)

    for layer in model.layers:
        layer.forward = functools.partial(forward, layer)


def broken_before(journal: str) -> str:
    """Why the trainer's step is not tried again: it hung or ended the process and has never worked yet. Or ""."""
    steps = {key: r for key, r in Journal(Path(journal)).results().items() if key.startswith("steps/")}
    worked = any(r["state"] == "done" and r["value"]["loop"] == TRAINER for r in steps.values())
    hung = ("no end after", "the process ended by")  # a device that a kernel spoilt is not DeepSpeed's doing
    ended = [f"{key}: {r['reason']}" for key, r in steps.items() if r.get("reason", "").startswith(hung)]
    return "" if worked or not ended else f"it ended the process before ({ended[0]})"


def updates(data: str, rows: int, seed: int, device: str) -> list[Update]:
    """Batches of the dataset's first rows, in pinned memory for a GPU."""
    dataset = Dataset(data)
    m = dataset.manifest
    starts = np.ones(m.vocab_size, bool)  # masking by token asks for no words, so no tokenizer is needed
    vocabulary = Vocabulary(m.vocab_size, m.special_ids["mask"], m.special_ids.values(), starts)
    loader = Loader(dataset, vocabulary, global_batch=rows, micro_batch=rows, seed=seed, pin_memory=device == "cuda")
    return list(itertools.islice(loader, BATCHES))


def measure(
    setup: dict[str, Any], data: str, rows: int, device: str, small: bool, journal: str, seconds: float = 3.0
) -> dict[str, Any]:
    """Rows a second of updates of `rows` rows, one micro-step each."""
    what, where, manifest = Setup(**setup), torch.device(device), Dataset(data).manifest
    keep_freed_memory()
    refused = allocations_refused()

    def run() -> tuple[list[Update], list[float], list[float]]:
        build(what, device, manifest.seq_len, rows, manifest.vocab_size, small, journal)
        batches = updates(data, rows, LIVE.cfg.seed, device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return batches, *timed(batches, where, 0.0 if small else seconds)

    try:
        batches, times, losses = run()
    except RuntimeError as error:
        if out_of_memory(error, refused):
            LIVE.release()
            raise Absent(f"out of memory: {str(error).splitlines()[0]:.200}") from None
        by_trainer = LIVE.kind == TRAINER
        LIVE.release()
        if not by_trainer or what.special or not healthy(device):
            raise
        LIVE.trouble = f"its update fails: {type(error).__name__}: {error}"[:500]
        try:
            batches, times, losses = run()
        except Exception:
            LIVE.release()
            LIVE.trouble = ""  # it is not DeepSpeed that fails
            raise
    step, tokens = quantiles(times), sum(u.tokens for u in batches) / len(batches)
    model = LIVE.cfg.model
    squares = sum(int((u.batches[0].lengths.long() ** 2).sum()) for u in batches) / len(batches)
    count = {name: sum(getattr(u, name) for u in batches) / len(batches) for name in ("predictions", "sequences")}
    flops = training_flops(model, round(tokens), round(squares), round(count["predictions"]), round(count["sequences"]))
    sheet = datasheet_tflops(torch.cuda.get_device_name(where)) if device == "cuda" else None
    return {
        "setup": what.name, **dataclasses.asdict(what), "seq_len": manifest.seq_len, "rows": rows, "loop": LIVE.kind,
        "backends": LIVE.cfg.ops.model_dump(), "notes": LIVE.notes, "updates": len(times), "step_seconds": step,
        "full_rows_per_sec": tokens / manifest.seq_len / step["p50"], "fill": tokens / rows / manifest.seq_len,
        "real_tokens_per_sec": tokens / step["p50"], "tflops": flops / step["p50"] / 1e12,
        "mfu_datasheet": flops / step["p50"] / 1e12 / sheet if sheet else None,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None, "losses": losses,
    }  # fmt: skip


def timed(batches: list[Update], device: torch.device, seconds: float) -> tuple[list[float], list[float]]:
    """(seconds of each update, losses of the first and the last); nothing is waited for inside, on a GPU."""
    for number in range(WARM_UP):
        first = one(batches[number % len(batches)])
        synchronise(device)
        start = time.perf_counter()
    one(batches[0])
    synchronise(device)
    count = max(3, min(60, round(seconds / (time.perf_counter() - start))))
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for number, mark in enumerate(marks[1:]):
            last = one(batches[number % len(batches)])
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    else:
        times = []
        for number in range(count):
            start = time.perf_counter()
            last = one(batches[number % len(batches)])
            times.append(time.perf_counter() - start)
    return times, [float(loss_of(result)) for result in (first, last)]


def one(update: Update) -> Any:
    return LIVE.engine.train_update(update, LR)


def loss_of(result: Any) -> Any:
    return result.loss if hasattr(result, "loss") else result

"""Backends chosen by measurement at the start of a run: rank 0 decides, all ranks obey; the table is cached and kept with the run.

What the configuration names is taken as it is and not timed. For each `auto` the choice is, in this order: the one
recorded in the run folder, so that a resumed run is the same bit for bit; the cache's; the one measured now. Each holds for
one key only: device, driver, torch, native library, shapes, and which candidates can run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megabert import ops
from megabert.common import errors
from megabert.common.atomic_io import write_whole
from megabert.common.canonical_json import canonical, compact
from megabert.common.logs import log
from megabert.config import Config
from megabert.data.objective import largest_capacity
from megabert.data.shards import Manifest
from megabert.distributed.process_group import World
from megabert.distributed.together import refuse, together
from megabert.engine import DTYPES
from megabert.engine.precision import repeat_bit_for_bit
from megabert.ops.candidates import SECONDS, DeviceLost, Measured, Row, measure
from megabert.ops.problems import Shapes

MEASURED_ON = ("cuda",)  # device types; on the others `auto` is `ops.choose`'s, which costs nothing at the start
RECORD = "backends.json"  # in the run folder


class Entry(NamedTuple):
    """One operation's choice as it is cached and recorded."""

    role: str
    name: str  # the backend that runs
    key: dict[str, Any]  # what the choice holds for
    rows: list[Row]

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Entry:
        """From JSON. Raises KeyError or TypeError where it is something else."""
        rows = [Row(**row) for row in saved["rows"]]
        return cls(str(saved["role"]), str(saved["name"]), dict(saved["key"]), rows)

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"rows": [row._asdict() for row in self.rows]}

    def label(self) -> str:
        """The operation and what it was asked, short."""
        shapes = self.key["shapes"]
        return f"{self.role} {shapes['rows']} x {shapes['seq_len']} {shapes['dtype'].removeprefix('torch.')}"

    def line(self) -> str:
        """The table in one line, the fastest first, the losers with their reasons."""
        timed = sorted((row.ms, row.name) for row in self.rows if row.ms is not None)
        others = [f"no {row.name}: {row.reason}" for row in self.rows if row.ms is None and row.name != self.name]
        return "; ".join([", ".join(f"{name} {ms:.3g} ms" for ms, name in timed) or "nothing timed", *others])


def settle(config: Config, manifest: Manifest, world: World, run_dir: Path, writes: bool = True) -> Config:
    """`config` with a backend's name for every `auto` that is measured on this device; logged, cached and, if `writes`,
    recorded in the run folder. A collective.

    Raises ValueError or Failed on every rank where rank 0 finds no right backend, or a rank cannot run what rank 0 chose.
    """
    roles = [role for role in ops.BACKENDS if getattr(config.ops, role) == "auto"]
    if world.device.type not in MEASURED_ON or not roles:
        return config
    if config.deterministic:  # before the first product, and so that what cannot repeat is not chosen
        repeat_bit_for_bit()
    found: list[dict[str, Any]] = []

    def decide() -> None:
        here = place(world.device)
        try:
            for role in roles:
                shapes, measuring = _asked(role, config, manifest, world, SECONDS / len(roles))
                reasons = obstacles(role, config, world.device) | _broken(here, role)
                found.append(_choose(role, here, shapes, reasons, run_dir, measuring).as_json())
        except DeviceLost as error:
            file = _break(here, error)
            raise errors.Failed(f"{error}; noted in {file}: the next start leaves it out") from error
        except RuntimeError as error:  # of the device: it is not known to be well, and the other ranks wait
            raise errors.Failed(f"measuring ops.{role} failed: {str(error).splitlines()[0]}") from error
        if writes:
            write_whole(run_dir / RECORD, canonical(found))

    together(world, decide)
    entries = [Entry.of(saved) for saved in world.broadcast(found)]
    problems = [
        f"ops.{entry.role}=auto is {entry.name} on rank 0 and cannot run here: {reason}"
        for entry in entries
        if (reason := obstacles(entry.role, config, world.device)[entry.name])
    ]
    refuse(world, "; ".join(problems), errors.USER_ERROR if problems else errors.OK)
    chosen = config.ops.model_copy(update={entry.role: entry.name for entry in entries})
    return config.model_copy(update={"ops": chosen})


def shapes_of(config: Config, manifest: Manifest) -> Shapes:
    """What a micro-batch of this run asks of the operations."""
    model = config.model
    return Shapes(
        rows=config.batch.micro_size,
        seq_len=manifest.seq_len,
        slots=manifest.max_sequences,
        sequences=manifest.statistics["sequences"] / manifest.rows,
        predictions=largest_capacity(config, manifest.seq_len),
        hidden=model.hidden,
        heads=model.heads,
        ffn=model.ffn,
        vocab=model.vocab_size,
        padded_vocab=model.padded_vocab,
        gated=model.modern,
        norm=model.norm,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        eps=model.layer_norm_eps,
        causal=config.causal_updates,
        dtype=DTYPES[config.precision],
    )


def obstacles(role: str, config: Config, device: torch.device) -> dict[str, str]:
    """Why each backend of an operation cannot run; "" where it can."""
    head_size = config.model.hidden // config.model.heads
    return ops.obstacles(role, device.type, DTYPES[config.precision], config.causal_updates, head_size)


def _asked(
    role: str, config: Config, manifest: Manifest, world: World, seconds: float
) -> tuple[dict[str, Any], Callable[[dict[str, str]], Measured]]:
    """What a choice depends on besides the place, and what measures it."""
    asked = shapes_of(config, manifest)
    return asked.key(), lambda reasons: measure(role, asked, world.device, seconds, reasons)


def _choose(
    role: str,
    here: Mapping[str, Any],
    shapes: Mapping[str, Any],
    reasons: dict[str, str],
    run_dir: Path,
    measuring: Callable[[dict[str, str]], Measured],
) -> Entry:
    """Recorded, cached or measured now; logged. Where only one can run there is nothing to measure."""
    able = [name for name, reason in reasons.items() if not reason]
    key = dict(here) | {"role": role, "able": able, "shapes": dict(shapes)}
    entry, source = _recorded(run_dir, role, key), "as recorded with this run"
    if entry is None:
        entry, source = _read(cache_file(key)), "from the cache"
    if entry is None or entry.key != key:
        if len(able) == 1:
            rows = [Row(role, name, reason=reason or "the only one that can run") for name, reason in reasons.items()]
            entry, source = Entry(role, able[0], key, rows), "the only one that can run"
        else:
            measured = measuring(reasons)
            entry, source = Entry(role, measured.choice.name, key, measured.rows), "measured now"
            _write(cache_file(key), canonical(entry.as_json()))
    log.info(f"ops.{role}=auto is {entry.name}, {source}: {entry.line()}")
    return entry


def _recorded(run_dir: Path, role: str, key: Mapping[str, Any]) -> Entry | None:
    """The run's own choice, where it was made for the same; said where it was made for something else."""
    saved = _json(run_dir / RECORD) or []
    entry = next((e for e in map(_entry, saved) if e is not None and e.role == role), None)
    if entry is None or entry.key == key:
        return entry
    changed = [name for name in key if entry.key.get(name) != key[name]]
    log.warning(
        f"ops.{role}=auto was {entry.name} for another {', '.join(changed)}: it is chosen anew, and this run does not "
        f"go on bit for bit; ops.{role}={entry.name} keeps it"
    )
    return None


# -- the cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/megabert/backends`, or the same under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabert" / "backends"


def cache_file(key: Mapping[str, Any]) -> Path:
    return cache_folder() / f"{hashlib.sha256(compact(key)).hexdigest()[:32]}.json"


def place(device: torch.device) -> dict[str, Any]:
    """What decides how fast an operation is here, its shapes aside: device, driver, torch and its mode, native library."""
    library = hashlib.sha256(ops.LIBRARY.read_bytes()).hexdigest() if not ops.MISSING else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    here: dict[str, Any] = {"device": name, "driver": driver(), "torch": torch.__version__, "library": library}
    return here | {"deterministic": torch.are_deterministic_algorithms_enabled()}  # some backends then cannot run


def driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of NVIDIA's kernel module; "" without one. nvidia-smi would take longer than all the rest."""
    match = re.search(r"\d+(?:\.\d+)+", file.read_text()) if file.is_file() else None
    return match[0] if match else ""


def cached(device: torch.device) -> list[Entry]:
    """The cache's entries that hold on this machine, in the operations' order."""
    here = place(device)
    entries = [entry for path in sorted(cache_folder().glob("*.json")) if (entry := _read(path))]
    own = [entry for entry in entries if {name: entry.key.get(name) for name in here} == here]
    return sorted(own, key=lambda entry: (entry.role, compact(entry.key)))


def _broken_file(here: Mapping[str, Any], role: str) -> Path:
    return cache_file({"broken": role, **here})


def _broken(here: Mapping[str, Any], role: str) -> dict[str, str]:
    """Candidates that broke the device here before, with what to do about it."""
    path = _broken_file(here, role)
    saved = _json(path) or {}
    return {name: f"{reason}; remove {path} to try it again" for name, reason in saved.items() if name != "broken"}


def _break(here: Mapping[str, Any], error: DeviceLost) -> Path:
    path = _broken_file(here, error.role)
    _write(path, canonical((_json(path) or {"broken": error.role}) | {error.name: str(error)}))
    return path


def _read(path: Path) -> Entry | None:
    return _entry(_json(path), path)


def _entry(saved: Any, path: Path | None = None) -> Entry | None:
    if saved is None:
        return None
    try:
        if "broken" in saved:  # see _break
            return None
        return Entry.of(saved)
    except (KeyError, TypeError, AttributeError) as error:
        log.warning(f"{path or RECORD}: not a table of backends ({error!r}); it is measured anew")
        return None


def _json(path: Path) -> Any:
    """A file's JSON; None where there is no file, or no JSON, which is said."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning(f"{path}: {error}; it is measured anew")
        return None


def _write(path: Path, data: bytes) -> None:
    """A cache that cannot be written costs the next start its seconds, and not this run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        log.warning(f"{path}: {errors.describe(error)}; the next start measures again")

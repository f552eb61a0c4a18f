"""A unit is a few megabytes of documents; what it becomes depends on them, the options and its number alone.

Its sequences go to disk ordered by a random 64-bit key drawn from (seed, task, unit), so that a global
shuffle is later a merge of key ranges. Held-out documents are set aside as tokens, since one unit holds too
few of them to take random sentences from another.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep import clean, pairs, sources
from data_prep.options import BuildOptions
from data_prep.problems import BadInput, Problems
from data_prep.sources import Task
from data_prep.words import Encoded, WordEncoder
from megabert.tokenizer import Tokenizer

UNIT_BYTES = 8 << 20  # of text
WORDS_AT_ONCE = 1 << 18
HELD_GROUP_TOKENS = 1 << 21
STREAM_TRAIN, STREAM_HELD = 0, 1
META = np.dtype([("key", "<u8"), ("start", "<u4"), ("length", "<u2"), ("first", "<u2"), ("label", "i1")])


@dataclass(frozen=True)
class Job:
    """What every worker needs to know; equal for all of them."""

    options: BuildOptions
    tokenizer: str
    work: str
    held_limit: int  # documents whose 64-bit hash is below are held out
    slots: int = 0  # sequences a row at most, once that is known


def _zeros() -> dict[str, float]:
    return defaultdict(float)


@dataclass
class Done:
    """What one item of work reports. `units` and `held` list (file stem, sequences or documents, tokens)."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=_zeros)
    problems: Counter[str] = field(default_factory=Counter)
    units: list[tuple[str, int, int]] = field(default_factory=list)
    held: list[tuple[str, int, int]] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)  # of sequences, in tokens
    least_hash: int = 1 << 64
    size: int = 0  # input bytes on disk
    peak: int = 0  # bytes, of the process that did it


def peak_memory() -> int:
    """Largest resident size of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def document_hash(text: bytes, seed: int) -> int:
    """64 uniform bits from a document's bytes and the seed: equal documents are held out together."""
    digest = hashlib.blake2b(text, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


_encoders: dict[tuple[str, str], tuple[Tokenizer, WordEncoder]] = {}


def encoder_of(job: Job) -> tuple[Tokenizer, WordEncoder]:
    """The tokenizer and its word cache, kept for the life of the process."""
    key = (job.tokenizer, job.work)
    if key not in _encoders:
        _encoders.clear()
        tokenizer = Tokenizer.load(job.tokenizer)
        _encoders[key] = (tokenizer, WordEncoder(tokenizer.processor, id_dtype(tokenizer)))
    return _encoders[key]


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 65_535 else np.uint32)


def texts(task: Task, job: Job, done: Done, problems: Problems) -> Iterator[tuple[list[str], int, int]]:
    """(paragraphs, 64-bit hash, UTF-8 bytes) of each document of a task."""
    read = job.options.read
    clock = time.perf_counter
    before = clock()
    for piece in task.pieces:
        for document in sources.read(piece, read, problems):
            done.seconds["read"] += clock() - before
            before = clock()
            if isinstance(document.text, str):
                raw = document.text.encode("utf-8", "replace")  # JSON can spell half a surrogate pair
            else:
                raw = document.text
            try:
                text, nuls = clean.decode(raw)
            except UnicodeDecodeError as error:
                problems.bad(document.path, document.offset + error.start, "invalid UTF-8")
                before = clock()
                continue
            done.counts["nuls"] += nuls
            found = clean.paragraphs(text, document.markup), document_hash(raw, job.options.seed), len(raw)
            done.seconds["clean"] += clock() - before
            yield found
            before = clock()
    done.seconds["read"] += clock() - before


def process_task(job: Job, task: Task) -> Done:
    """Turn one task into unit files and held-out files in the work folder."""
    done, problems = Done(size=task.size), Problems(job.options.on_error)
    tokenizer, encoder = encoder_of(job)
    clock = time.perf_counter
    parts: list[Encoded] = []
    held: list[bool] = []
    text_bytes, unit = 0, 0

    def encode() -> None:
        before = clock()
        parts.append(encoder.finish())
        done.seconds["split and encode"] += clock() - before

    def flush() -> None:
        nonlocal parts, held, text_bytes, unit
        encode()
        encoded = Encoded.join(parts, encoder.dtype)
        is_held = np.array(held, bool)
        name = f"{task.index:07d}-{unit:05d}"
        full = encoded.document_sizes > 0
        done.counts["documents"] += int((full & ~is_held).sum())
        done.counts["empty documents"] += int((~full).sum())
        if (full & is_held).any():
            _spool(job, f"held-{name}", encoded.select(full & is_held), done)
        if is_held.any():
            encoded = encoded.select(~is_held)
        if len(encoded.tokens):
            write_unit(job, tokenizer, f"train-{name}", encoded, (STREAM_TRAIN, task.index, unit), done)
        parts, held, text_bytes, unit = [], [], 0, unit + 1

    for paragraphs, hash_, size in texts(task, job, done, problems):
        before = clock()
        encoder.add(paragraphs)
        done.seconds["split and encode"] += clock() - before
        done.least_hash = min(done.least_hash, hash_)
        held.append(hash_ < job.held_limit)
        done.counts["held-out bytes" if held[-1] else "bytes"] += size
        text_bytes += size
        if encoder.pending >= WORDS_AT_ONCE:
            encode()
        if text_bytes >= UNIT_BYTES:
            flush()
    if held:
        flush()
    done.problems, done.peak = problems.counts, peak_memory()
    return done


def write_arrays(path: str, *arrays: np.ndarray) -> None:
    with open(path, "wb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).data.cast("B"))


def _spool(job: Job, name: str, encoded: Encoded, done: Done) -> None:
    for suffix, array in (
        ("tokens", encoded.tokens),
        ("sentences", encoded.sentence_lengths),
        ("documents", encoded.document_sizes),
    ):
        write_arrays(os.path.join(job.work, f"{name}.{suffix}"), array)
    done.held.append((name, len(encoded.document_sizes), len(encoded.tokens)))


def write_unit(
    job: Job, tokenizer: Tokenizer, name: str, encoded: Encoded, stream: tuple[int, ...], done: Done
) -> None:
    """Choose the sequences of `encoded` and write them ordered by key: NAME.meta and NAME.ids."""
    clock = time.perf_counter
    before = clock()
    options = job.options
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([options.seed, *stream])))
    if options.nsp:
        capacity = options.seq_len - pairs.PAIR_SPECIALS
        ranges = pairs.sentence_pairs(encoded, capacity, options.short_share, rng)
    else:
        capacity = options.seq_len - pairs.SINGLE_SPECIALS
        ranges = pairs.full_sentences(encoded, capacity, options.short_share, rng)
    keys = rng.integers(0, 1 << 64, len(ranges.labels), dtype=np.uint64)
    order = np.argsort(keys, kind="stable")
    flat, lengths, first = pairs.assemble(encoded.tokens, ranges, order, tokenizer.cls_id, tokenizer.sep_id)
    meta = np.empty(len(order), META)
    meta["key"], meta["label"] = keys[order], ranges.labels[order]
    meta["start"], meta["length"], meta["first"] = np.cumsum(lengths) - lengths, lengths, first
    done.seconds["pairs"] += clock() - before
    before = clock()
    write_arrays(os.path.join(job.work, f"{name}.meta"), meta)
    write_arrays(os.path.join(job.work, f"{name}.ids"), flat)
    done.seconds["spool"] += clock() - before
    done.units.append((name, len(meta), len(flat)))
    counts = np.bincount(lengths)
    done.lengths.update({int(n): int(counts[n]) for n in np.flatnonzero(counts)})
    done.counts["sentences"] += len(encoded.sentence_lengths)
    done.counts["corpus tokens"] += len(encoded.tokens)
    done.counts["sequences"] += len(meta)
    done.counts["tokens"] += len(flat)
    done.counts["pairs"] += int((ranges.labels >= 0).sum())
    done.counts["random next"] += int((ranges.labels == 1).sum())


@dataclass(frozen=True)
class HeldGroup:
    index: int
    names: tuple[str, ...]


def held_groups(held: list[tuple[str, int, int]]) -> list[HeldGroup]:
    """Consecutive held-out files that together make about one unit."""
    groups: list[HeldGroup] = []
    names: list[str] = []
    weight = 0
    for i, (name, _, tokens) in enumerate(held):
        names.append(name)
        weight += tokens
        if weight >= HELD_GROUP_TOKENS or i == len(held) - 1:
            groups.append(HeldGroup(len(groups), tuple(names)))
            names, weight = [], 0
    return groups


def process_held(job: Job, group: HeldGroup) -> Done:
    """Turn set-aside documents into one unit of the held-out dataset."""
    tokenizer = encoder_of(job)[0]
    parts = []
    for name in group.names:
        arrays: list[Any] = []
        for suffix, dtype in (
            ("tokens", id_dtype(tokenizer)),
            ("sentences", np.int64),
            ("documents", np.int64),
        ):
            path = os.path.join(job.work, f"{name}.{suffix}")
            arrays.append(np.fromfile(path, dtype))
            os.unlink(path)
        parts.append(Encoded(*arrays))
    done = Done()
    encoded = Encoded.join(parts, id_dtype(tokenizer))
    done.counts["documents"] += len(encoded.document_sizes)
    write_unit(job, tokenizer, f"heldout-{group.index:07d}", encoded, (STREAM_HELD, group.index), done)
    done.peak = peak_memory()
    return done


def too_small(tokens: int, seq_len: int) -> BadInput:
    return BadInput(
        f"--input: the corpus makes only {tokens} tokens, less than one row of {seq_len}; give more text"
    )

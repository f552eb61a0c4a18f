"""Sequences of one row length, drawn from the kept documents of a task.

They go to disk ordered by a random 64-bit key, so that the global shuffle is later a merge of key ranges. What a task
becomes depends on its documents, the options and its number alone. Held-out documents of several tasks make one unit, since
one task holds too few of them to take random sentences from another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from data_prep.common import hashing
from data_prep.executor import work_files
from data_prep.executor.work_files import SEQUENCE, Done, Job, Writer
from data_prep.stages import read
from data_prep.tokens import long_sentences, sentence_pairs
from data_prep.tokens.encoder import Encoded

STREAM_TRAIN, STREAM_HELD = 0, 1
HELD_UNIT_TOKENS = 1 << 21
_AT_ONCE = 1 << 15  # sequences written together


@dataclass(frozen=True)
class Kept:
    """What a task kept: sizes of its units in documents, its corpus, and which mask applies ("" | keep | trim)."""

    task: int
    units: tuple[int, ...]
    corpus: int
    mask: str

    def load(self, job: Job) -> list[tuple[np.ndarray, Encoded]]:
        """(DOCUMENT [d], documents) of each unit; a document that was dropped has size 0."""
        table, units = read.load(job, self.task, list(self.units))
        mask = work_files.read(job, f"{self.mask}-{self.task:07d}.mask", "bool") if self.mask else None
        parts, d, s = [], 0, 0
        for unit in units:
            d_end, s_end = d + len(unit.document_sizes), s + len(unit.sentence_lengths)
            left = unit if mask is None else unit.select_sentences(mask[s:s_end])
            parts.append((table[d:d_end], left))
            d, s = d_end, s_end
        return parts


@dataclass(frozen=True)
class Draw:
    """Sequences of `seq_len` from `parts`; `kind` is train (one task) or heldout (a group of them)."""

    kind: str
    index: int
    seq_len: int
    parts: tuple[Kept, ...]


def train_draws(parts: list[Kept], seq_len: int) -> list[Draw]:
    return [Draw("train", i, seq_len, (part,)) for i, part in enumerate(parts)]


def held_groups(parts: list[Kept], held_tokens: list[int], seq_len: int) -> list[Draw]:
    """Consecutive tasks with held-out documents that together make about one unit."""
    groups: list[Draw] = []
    members: list[Kept] = []
    weight = 0
    for part, tokens in zip(parts, held_tokens, strict=True):
        if tokens:
            members.append(part)
            weight += tokens
        if weight >= HELD_UNIT_TOKENS:
            groups.append(Draw("heldout", len(groups), seq_len, tuple(members)))
            members, weight = [], 0
    if members:
        groups.append(Draw("heldout", len(groups), seq_len, tuple(members)))
    return groups


def draw(job: Job, item: Draw) -> Done:
    """Write KIND-LENGTH-INDEX.{meta,ids}: SEQUENCE records ordered by key, and their ids in that order."""
    done = Done()
    before = time.perf_counter()
    if item.kind == "train":
        units = _train_units(job, item.parts[0], done)
    else:
        units = _held_unit(job, item, done)
    done.seconds["load"] += time.perf_counter() - before
    before = time.perf_counter()
    stream = STREAM_TRAIN if item.kind == "train" else STREAM_HELD
    parts: list[sentence_pairs.Ranges] = []
    keys: list[np.ndarray] = []
    base = 0
    for number, unit in enumerate(units):
        seed = np.random.SeedSequence([job.options.seed, stream, item.seq_len, item.index, number])
        rng = np.random.Generator(np.random.Philox(seed))
        ranges = _choose(job, item.seq_len, unit, rng, done)
        ranges.spans += base
        base += len(unit.tokens)
        parts.append(ranges)
        keys.append(rng.integers(0, 1 << 64, len(ranges.labels), dtype=np.uint64))
        full = unit.document_sizes > 0
        done.counts["documents"] += int(full.sum())
        done.counts["sentences"] += len(unit.sentence_lengths)
        done.counts["corpus tokens"] += len(unit.tokens)
        done.counts["borrowed tokens"] += ranges.borrowed
        done.counts["truncated tokens"] += ranges.truncated
    done.seconds["pairs"] += time.perf_counter() - before
    before = time.perf_counter()
    _write(job, item, units, parts, keys, done)
    done.seconds["sort"] += time.perf_counter() - before
    return done


def _train_units(job: Job, part: Kept, done: Done) -> list[Encoded]:
    """Training documents of each unit, a unit again for each copy that the corpus' weight asks for."""
    units = []
    weight = job.weights[part.corpus]
    whole = max(1, int(weight))
    for table, unit in part.load(job):
        ours = table["hash"] >= job.held_limit
        copies = [unit.select(ours)] * whole
        if weight > whole:
            copies.append(unit.select(ours & hashing.chosen(table["hash"], weight - whole)))
        for copy in copies[1:]:
            done.counts["repeated documents"] += int((copy.document_sizes > 0).sum())
            done.counts["repeated sentences"] += len(copy.sentence_lengths)
            done.counts["repeated tokens"] += len(copy.tokens)
        done.counts["bytes"] += int(table["bytes"][ours & (unit.document_sizes > 0)].sum())
        units += copies
    return [unit for unit in units if len(unit.tokens)]


def _held_unit(job: Job, item: Draw, done: Done) -> list[Encoded]:
    found = []
    for part in item.parts:
        for table, unit in part.load(job):
            held = table["hash"] < job.held_limit
            found.append(unit.select(held))
            done.counts["bytes"] += int(table["bytes"][held & (unit.document_sizes > 0)].sum())
    joined = Encoded.join(found, work_files.id_dtype(read.encoder_of(job)[0]))
    return [joined] if len(joined.tokens) else []


def _choose(job: Job, seq_len: int, unit: Encoded, rng: np.random.Generator, done: Done) -> sentence_pairs.Ranges:
    options = job.options
    if options.nsp:
        capacity = seq_len - sentence_pairs.PAIR_SPECIALS
        if limit := long_sentences.limit_of(unit, capacity, options.max_sentence):
            whole = len(unit.sentence_lengths)
            unit = long_sentences.split(unit, limit, read.encoder_of(job)[0])
            done.counts["split sentences"] += len(unit.sentence_lengths) - whole
        return sentence_pairs.sentence_pairs(unit, capacity, options.short_share, rng)
    capacity = seq_len - sentence_pairs.SINGLE_SPECIALS
    word_start = read.encoder_of(job)[0].word_start
    return sentence_pairs.filled_rows(unit, capacity, options.short_share, word_start, rng)


def _write(
    job: Job, item: Draw, units: list[Encoded], parts: list[sentence_pairs.Ranges], keys: list[np.ndarray], done: Done
) -> None:
    tokenizer = read.encoder_of(job)[0]
    tokens = np.concatenate([unit.tokens for unit in units]) if units else np.zeros(0, work_files.id_dtype(tokenizer))
    spans = np.concatenate([part.spans for part in parts]) if parts else np.zeros((0, 4), np.int64)
    labels = np.concatenate([part.labels for part in parts]) if parts else np.zeros(0, np.int8)
    key = np.concatenate(keys) if keys else np.zeros(0, np.uint64)
    order = np.argsort(key, kind="stable")
    stem = f"{item.kind}-{item.seq_len}-{item.index:07d}"
    written = 0
    with Writer(job, f"{stem}.meta", done) as metas, Writer(job, f"{stem}.ids", done) as ids:
        for first in range(0, len(order), _AT_ONCE):
            chosen = order[first : first + _AT_ONCE]
            flat, lengths, of_a = sentence_pairs.assemble(
                tokens, sentence_pairs.Ranges(spans, labels), chosen, tokenizer.cls_id, tokenizer.sep_id
            )
            meta = np.zeros(len(chosen), SEQUENCE)
            meta["key"], meta["label"] = key[chosen], labels[chosen]
            meta["start"], meta["length"], meta["first"] = (written + np.cumsum(lengths) - lengths, lengths, of_a)
            metas.write(meta)
            ids.write(flat)
            written += len(flat)
            done.count("tokens of a sequence", lengths)
    done.counts["sequences"] += len(order)
    done.counts["tokens"] += written
    done.counts["pairs"] += int((labels >= 0).sum())
    done.counts["random next"] += int((labels == 1).sum())

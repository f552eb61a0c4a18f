"""Repeated substrings: runs of N words that were there before are cut out of documents, wherever they begin and end.

After Lee et al. 2022, "Deduplicating Training Data Makes Language Models Better", who cut substrings of 50 tokens. Every N words in
a row of what deduplication left make a record: a 128-bit hash of their tokens and the number of the first word. Records of all tasks
are met by ranges of the hash as those of documents are (`dedup`); of equal ones the first in input order stays, and the words of all
others go. What is cut is thus the union of all windows that occurred before, longest repeats and overlapping ones included, and it
begins and ends at words. Where a window overlaps the one that stays, as in a line that says the same thing over and over, the
words of the latter stay.

Equal hashes are taken for equal words: of 10^12 different windows some two are equal with a probability below 10^-14
(n^2 / 2^129). Words are the tokenizer's, in scripts without spaces its pieces. Legend: t tokens, w words, d documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data_prep.common import hashing
from data_prep.executor import work_files
from data_prep.executor.work_files import CUT, CUT_WORDS, SUBSTRING, TASK_SHIFT, Done, Job
from data_prep.stages import dedup, read
from data_prep.stages.sequences import Kept
from data_prep.tokens.encoder import Encoded
from megabert.common.hash_mixer import GOLDEN64, mix64

KIND = "substrings"
LOST = "repeated substrings alone"
EXAMPLE_TOKENS = 60
AT_ONCE = 1 << 18  # records written together


@dataclass(frozen=True)
class Cut:
    """What a task kept so far, and where its repeated windows are listed."""

    kept: Kept
    drops: dedup.Drops


def cuts(kept: list[Kept], found: dedup.Drops | list[dedup.Gather]) -> list[Cut]:
    masks = dedup.task_masks(len(kept), [found])
    return [Cut(its, mask.drops[0]) for its, mask in zip(kept, masks, strict=True)]


def _words(unit: Encoded, begins_word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first token of each word, then the number of tokens, int64 [w + 1]; first word of each document likewise [d + 1]).

    `begins_word` is bool [vocabulary]. A sentence begins with a word.
    """
    sentences = np.append(0, np.cumsum(unit.sentence_lengths))
    begins = np.append(begins_word[unit.tokens], True)
    begins[sentences] = True
    edges = np.flatnonzero(begins)
    documents = sentences[np.append(0, np.cumsum(unit.document_sizes))]
    return edges, np.searchsorted(edges, documents)


def _windows(unit: Encoded, edges: np.ndarray, documents: np.ndarray, size: int) -> np.ndarray:
    """SUBSTRING [n]: each `size` words in a row of one document; `number` is the first word's place in the unit."""
    first = np.arange(max(len(edges) - size, 0))
    end = np.repeat(documents[1:], np.diff(documents))[: len(first)]
    first = first[first + size <= end]
    tokens = unit.tokens.astype(np.uint64)
    found = np.zeros(len(first), SUBSTRING)
    found["number"] = first
    for name, parts in (("key", tokens), ("check", mix64(tokens ^ GOLDEN64))):
        found[name] = hashing.of_windows(hashing.of_runs(parts, edges), size)[first]
    return found


def windows(job: Job, kept: Kept) -> Done:
    """Write windows-TASK.substrings-keys: SUBSTRING ordered by key, of the words that are left of a task."""
    done = Done()
    begins_word = read.encoder_of(job)[0].unit_start
    base, count = kept.task << TASK_SHIFT, 0
    units = [unit for _, unit in kept.load(job)]
    records = np.empty(sum(len(unit.tokens) for unit in units), SUBSTRING)  # what is not used takes no memory
    for unit in units:
        edges, documents = _words(unit, begins_word)
        found = _windows(unit, edges, documents, job.options.dedup_substrings)
        found["number"] += np.uint64(base)
        records[count : count + len(found)] = found
        base, count = base + len(edges) - 1, count + len(found)
    records = records[:count]
    order = np.argsort(records["key"], kind="stable")
    with work_files.Writer(job, f"windows-{kept.task:07d}.{KIND}-keys", done) as file:
        for first in range(0, count, AT_ONCE):
            file.write(records[order[first : first + AT_ONCE]])
    done.facts["windows"] = count
    return done


def cut(job: Job, item: Cut) -> Done:
    """Write cut-TASK.mask, bool [t] of the tokens that are left of a task: false in repeated substrings."""
    done = Done()
    kept, size = item.kept, job.options.dedup_substrings
    tokenizer = read.encoder_of(job)[0]
    begin, stays = dedup.dropped(job, kept.task, item.drops)
    apart = (begin + (kept.task << TASK_SHIFT)) - stays.astype(np.int64)
    end = begin + size
    begin = begin + np.maximum(size - apart, 0)  # after the window that stays
    base = 0
    with work_files.Writer(job, f"cut-{kept.task:07d}.mask", done) as file:
        for _, unit in kept.load(job):
            edges, documents = _words(unit, tokenizer.unit_start)
            count = len(edges) - 1
            here = slice(*np.searchsorted(end, [base + 1, base + count + 1]))
            inside = [places[here] - base for places in (begin, end)]
            steps = np.bincount(inside[0], minlength=count + 1) - np.bincount(inside[1], minlength=count + 1)
            gone = np.cumsum(steps)[:count] > 0
            base += count
            keep = np.repeat(~gone, np.diff(edges))
            file.write(keep)
            _count(unit, keep, gone, documents, done)
            _show(unit, edges, gone, tokenizer.decode, done)
    return done


def _count(unit: Encoded, keep: np.ndarray, gone: np.ndarray, documents: np.ndarray, done: Done) -> None:
    left = unit.select_tokens(keep)
    before = np.append(False, gone[:-1])
    before[documents[documents < len(gone)]] = False  # no substring is of two documents
    done.counts[CUT] += int((gone & ~before).sum())
    done.counts[CUT_WORDS] += int(gone.sum())
    done.counts["dropped sentences"] += len(unit.sentence_lengths) - len(left.sentence_lengths)
    done.counts["dropped tokens"] += len(unit.tokens) - len(left.tokens)
    done.drop(LOST, int(((unit.document_sizes > 0) & (left.document_sizes == 0)).sum()), 0, 0, [])


def _show(unit: Encoded, edges: np.ndarray, gone: np.ndarray, decode: Callable[..., str], done: Done) -> None:
    """Keep the openings of the first few substrings as examples."""
    begins = np.flatnonzero(gone & ~np.append(False, gone[:-1]))[: work_files.EXAMPLES]
    ends = np.append(np.flatnonzero(~gone), len(gone))
    texts = []
    for first in begins.tolist():
        last = ends[np.searchsorted(ends, first)]
        texts.append(decode(unit.tokens[edges[first] : min(edges[last], edges[first] + EXAMPLE_TOKENS)]))
    if texts:
        done.example(CUT, texts)

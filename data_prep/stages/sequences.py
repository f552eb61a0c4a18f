"""Sequences of one row length, drawn from the kept documents of a task, and checks of their totals.

Sequences are written in the order of a random 64-bit key, so that the global shuffle is a merge of key ranges. The sequences of a
task depend only on its documents, the options and its number. Held-out documents of several tasks make one unit, since one task
has too few to draw random sentences from. A sequence is ranges of a unit's tokens, which are copied when all are chosen.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_prep.common.arrays import choose_share, range_indices
from data_prep.executor.journal import Stages
from data_prep.executor.output_folder import HELD_OUT
from data_prep.executor.work_files import BuildJob, ItemResult, TooLittleText, appending, id_dtype, job_tokenizer, total
from data_prep.stages import packing, passages
from data_prep.stages.kept import KeptDocuments
from data_prep.tokens.encoder import Encoded
from megabert.common.logs import log
from megabert.data.tokenizer import Tokenizer

# kinds of sequences and rows, and the streams of their random numbers
TRAIN, HELD = "train", "heldout"
STREAMS = {TRAIN: 0, HELD: 1}
# `start`: of its ids; `first`: length of [CLS] A [SEP]; `sources`: those of A and B of held-out sequences
SEQUENCE = np.dtype(
    [("key", "<u8"), ("start", "<u8"), ("length", "<u2"), ("first", "<u2"), ("label", "i1"), ("sources", "u1", (2,))]
)
HELD_UNIT_TOKENS = 1 << 21
# sequences written together
AT_ONCE = 1 << 15
# [CLS] A [SEP] B [SEP], and [CLS] A [SEP]
PAIR_SPECIALS, SINGLE_SPECIALS = 3, 2
# random numbers drawn together
DRAWS = 4096
# Truncating pairs would lose most of a text without sentence ends (transcripts, tables, scripts with unknown
# punctuation). If more than LONG_SHARE of a unit's tokens are in sentences longer than LONG_ROWS rows, which normal
# text never reaches, sentences are split into parts of 1 / PARTS of a row, but at least SHORTEST tokens.
LONG_ROWS, LONG_SHARE, PARTS, SHORTEST = 2, 0.2, 12, 8
# share of sequences with a shorter, uniformly distributed target length
SHORT_SHARE = 0.1
# shares of random pairs, of truncated tokens and of padding above which a build warns
MAX_RANDOM, MAX_TRUNCATED, MAX_PADDING = 0.6, 0.2, 0.5


@dataclass(frozen=True)
class RowSplit:
    """The training or held-out rows of one length, with shards in `folder` and at most `slots` sequences a row.

    They are made of the sequences in runs KIND-LENGTH-0 to KIND-LENGTH-(runs - 1), or merged-KIND-LENGTH-0 and so on.
    """

    kind: str
    seq_len: int
    runs: int
    slots: int
    folder: str = field(repr=False)
    merged: bool = False

    @property
    def stem(self) -> str:
        return f"{self.kind}-{self.seq_len}"

    def run(self, index: int) -> str:
        """Common part of the names of a run's files."""
        return f"{'merged-' if self.merged else ''}{self.stem}-{index:07d}"


@dataclass(frozen=True)
class SequenceDraw:
    """Sequences of `seq_len` from `parts`: for TRAIN one task, for HELD a group of them."""

    kind: str
    index: int
    seq_len: int
    parts: tuple[KeptDocuments, ...]


def run(
    stages: Stages, job: BuildJob, kept: list[KeptDocuments], seq_len: int, folder: Path
) -> list[tuple[RowSplit, ItemResult]]:
    """Draw all sequences of `seq_len`. Returns the held-out split, if there is any, and the training split, with their totals."""
    groups = group_held_out(kept, seq_len)
    draws = [SequenceDraw(TRAIN, i, seq_len, (part,)) for i, part in enumerate(kept)]
    drawn = stages.map(f"pairs {seq_len}", draw, job, [*groups, *draws])
    held, train = total(drawn[: len(groups)]), total(drawn[len(groups) :])
    check_totals(train, seq_len)
    slots = packing.choose_slots(train.lengths, seq_len)
    splits = [(RowSplit(TRAIN, seq_len, len(draws), slots, str(folder)), train)]
    if held.counts["sequences"]:
        splits.insert(0, (RowSplit(HELD, seq_len, len(groups), slots, str(folder / HELD_OUT)), held))
    return splits


def group_held_out(parts: list[KeptDocuments], seq_len: int) -> list[SequenceDraw]:
    """Groups of consecutive tasks whose held-out documents make about one unit."""
    groups: list[SequenceDraw] = []
    members: list[KeptDocuments] = []
    weight = 0
    for part in parts:
        if part.held_tokens:
            members.append(part)
            weight += part.held_tokens
        if weight >= HELD_UNIT_TOKENS or (members and part is parts[-1]):
            groups.append(SequenceDraw(HELD, len(groups), seq_len, tuple(members)))
            members, weight = [], 0
    return groups


def draw(job: BuildJob, item: SequenceDraw) -> ItemResult:
    """Write KIND-LENGTH-INDEX.{meta,ids}: SEQUENCE records ordered by key, and their ids in that order."""
    result, tokenizer = ItemResult(), job_tokenizer(job)
    sources: np.ndarray | None = None
    if item.kind == TRAIN:
        units = _train_units(job, item.parts[0], result)
    else:
        units, sources = _held_unit(job, item.parts, result)
    chosen: list[SequenceSpans] = []
    drawn_keys = [np.zeros(0, np.uint64)]
    for number, unit in enumerate(units):
        seed = np.random.SeedSequence([job.options.seed, STREAMS[item.kind], item.seq_len, item.index, number])
        rng = np.random.Generator(np.random.Philox(seed))
        chosen.append(_choose(job, item.seq_len, unit, rng))
        chosen[-1].spans += result.counts["corpus tokens"]
        drawn_keys.append(rng.integers(0, 1 << 64, len(chosen[-1].labels), dtype=np.uint64))
        result.counts["corpus tokens"] += len(unit.tokens)
        result.counts["borrowed tokens"] += chosen[-1].borrowed
        result.counts["truncated tokens"] += chosen[-1].truncated
    tokens = np.concatenate([np.zeros(0, id_dtype(job)), *(unit.tokens for unit in units)])
    spans = np.concatenate([np.zeros((0, 4), np.int64), *(one.spans for one in chosen)])
    labels = np.concatenate([np.zeros(0, np.int8), *(one.labels for one in chosen)])
    keys = np.concatenate(drawn_keys)
    order = np.argsort(keys, kind="stable")
    stem = f"{item.kind}-{item.seq_len}-{item.index:07d}"
    with appending(job, f"{stem}.meta", result) as append_meta, appending(job, f"{stem}.ids", result) as append_ids:
        for first in range(0, len(order), AT_ONCE):
            few = order[first : first + AT_ONCE]
            flat, lengths, of_a = assemble(tokens, spans[few], labels[few], tokenizer)
            meta = np.zeros(len(few), SEQUENCE)
            meta["key"], meta["label"], meta["length"], meta["first"] = keys[few], labels[few], lengths, of_a
            meta["start"] = result.counts["tokens"] + np.cumsum(lengths) - lengths
            if sources is not None:
                meta["sources"] = sources[spans[few][:, (0, 2)]]
            append_meta(meta)
            append_ids(flat)
            result.counts["tokens"] += len(flat)
            distinct, counts = np.unique(lengths, return_counts=True)
            result.lengths.update(dict(zip(distinct.tolist(), counts.tolist(), strict=True)))
    result.counts["sequences"] += len(order)
    result.counts["pairs"] += int((labels >= 0).sum())
    result.counts["random next"] += int((labels == 1).sum())
    return result


def _train_units(job: BuildJob, part: KeptDocuments, result: ItemResult) -> list[Encoded]:
    """Training documents of each unit, with a unit repeated by the weight of the corpus."""
    units, counts = [], result.counts
    weight = job.weights[part.corpus]
    whole = max(1, int(weight))
    for table, unit in part.load(job):
        segments = passages.split(job, table, unit)
        full = ~segments.held & (segments.encoded.document_sizes > 0)
        copies = [full] * whole
        if weight > whole:
            copies.append(full & choose_share(table["hash"], weight - whole)[segments.document])
        for number, copy in enumerate(copies):
            units.append(segments.encoded.select(copy))
            documents, sentences = len(np.unique(segments.document[copy])), int(segments.sentences[copy].sum())
            counts.update({"documents": documents, "sentences": sentences})
            if number:
                counts.update({"repeated documents": documents, "repeated sentences": sentences})
                counts["repeated tokens"] += len(units[-1].tokens)
        counts["bytes"] += int(segments.bytes[full].sum())
    return [unit for unit in units if len(unit.tokens)]


def _held_unit(job: BuildJob, parts: tuple[KeptDocuments, ...], result: ItemResult) -> tuple[list[Encoded], np.ndarray]:
    """Held-out documents or passages as one unit, if they have tokens, and the source of each token, uint8 [t].

    Documents that are partly in the training data are counted there.
    """
    units, sources, counts = [], [], result.counts
    for part in parts:
        for table, unit in part.load(job):
            segments = passages.split(job, table, unit)
            full = segments.encoded.document_sizes > 0
            held, trained = segments.held & full, ~segments.held & full
            units.append(segments.encoded.select(held))
            sources.append(np.repeat(table["source"][segments.document[held]], units[-1].document_tokens()))
            counts["documents"] += len(np.setdiff1d(segments.document[held], segments.document[trained]))
            counts["passages"] += int(held.sum())
            counts["sentences"] += int(segments.sentences[held].sum())
            counts["bytes"] += int(segments.bytes[held].sum())
    arrays = ([unit.tokens, unit.sentence_lengths, unit.document_sizes] for unit in units)
    joined = Encoded(*map(np.concatenate, zip(*arrays, strict=True)))
    return [joined] if len(joined.tokens) else [], np.concatenate(sources)


def _choose(job: BuildJob, seq_len: int, unit: Encoded, rng: np.random.Generator) -> SequenceSpans:
    tokenizer = job_tokenizer(job)
    if not job.options.nsp:
        return filled_rows(unit, seq_len - SINGLE_SPECIALS, SHORT_SHARE, tokenizer.word_start, rng)
    capacity = seq_len - PAIR_SPECIALS
    if limit := sentence_limit(unit, capacity):
        unit = split_long(unit, limit, tokenizer)
    return sentence_pairs(unit, capacity, SHORT_SHARE, rng)


@dataclass
class SequenceSpans:
    """n sequences: half-open token ranges of A and B, int64 [n, 4]; label int8 [n]: 0 next, 1 random, -1 no B.

    Before truncation every token is in one A or one true B: sum of spans = tokens + borrowed by random Bs - truncated.
    """

    spans: np.ndarray
    labels: np.ndarray
    borrowed: int = 0
    truncated: int = 0


def _draw_uniform(rng: np.random.Generator, count: int) -> Iterator[list[float]]:
    """Endless iterator over lists of `count` uniform random numbers in [0, 1)."""
    while True:
        yield from reversed(rng.random((DRAWS, count)).tolist())


def sentence_pairs(encoded: Encoded, capacity: int, short_share: float, rng: np.random.Generator) -> SequenceSpans:
    """A and B of each sequence, truncated to `capacity` tokens together.

    Source: Devlin et al. 2019, appendix A.2: sentences are collected up to a target length, which is the row's with probability 0.9
    and uniform in [2, row] with 0.1; a random sentence end among them ends A; in half of the cases (and always with a single
    sentence) B is a run of another document from a random sentence on, and the remaining sentences are used for the next sequence.
    Then the longer of A and B loses tokens, at its front or end with equal probability, until both fit. The target is drawn for
    each sequence, not once a document, so that a long document never becomes thousands of short sequences.

    B of a random pair is of another document of `encoded`; of a single one, of its other half, or its only sentence.
    """
    # of documents, in sentences
    edges = [0, *np.cumsum(encoded.document_sizes[encoded.document_sizes > 0]).tolist()]
    if len(edges) == 2 and edges[1] > 1:
        edges.insert(1, edges[1] // 2)
    at = [0, *np.cumsum(encoded.sentence_lengths).tolist()]  # token offset of each sentence
    documents, draws = len(edges) - 1, _draw_uniform(rng, 6)
    rows: list[tuple[int, int, int, int]] = []
    labels: list[int] = []
    for d in range(documents):
        i, end = edges[d], edges[d + 1]
        while i < end:
            short, target_draw, split, coin, other_draw, start_draw = next(draws)
            target = capacity if short >= short_share else 2 + int(target_draw * (capacity - 1))
            stop = bisect_left(at, at[i] + target, i + 1, end)
            gathered = stop - i
            a_end = i + 1 if gathered < 2 else i + 1 + int(split * (gathered - 1))
            if gathered == 1 or coin < 0.5:
                other = 0
                if documents > 1:
                    other = int(other_draw * (documents - 1))
                    other += other >= d
                low, high = edges[other], edges[other + 1]
                b_start = low + int(start_draw * (high - low))
                b_end = bisect_left(at, at[b_start] + target - (at[a_end] - at[i]), b_start + 1, high)
                rows.append((at[i], at[a_end], at[b_start], at[b_end]))
                labels.append(1)
                i = a_end
            else:
                rows.append((at[i], at[a_end], at[a_end], at[stop]))
                labels.append(0)
                i = stop
    spans = np.array(rows, np.int64).reshape(-1, 4)
    isnext = np.array(labels, np.int8)
    borrowed = int((spans[:, 3] - spans[:, 2])[isnext == 1].sum())
    return SequenceSpans(spans, isnext, borrowed, _truncate(spans, capacity, rng))


def _truncate(spans: np.ndarray, capacity: int, rng: np.random.Generator) -> int:
    """Shorten A and B in place, one token at a time from the longer (B if equal), in closed form.

    Returns the number of removed tokens.
    """
    length_a, length_b = spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]
    excess = np.maximum(length_a + length_b - capacity, 0)
    from_longer = np.minimum(excess, np.abs(length_a - length_b))
    rest = excess - from_longer
    cut_a = np.where(length_a > length_b, from_longer, 0) + rest // 2
    cut_b = np.where(length_a > length_b, 0, from_longer) + (rest + 1) // 2
    front_a, front_b = rng.binomial(cut_a, 0.5), rng.binomial(cut_b, 0.5)
    spans += np.stack([front_a, front_a - cut_a, front_b, front_b - cut_b], axis=1)
    return int(excess.sum())


def filled_rows(
    encoded: Encoded, capacity: int, short_share: float, word_start: np.ndarray, rng: np.random.Generator
) -> SequenceSpans:
    """Runs of `capacity` tokens inside documents, cut before a word, without dropping tokens.

    The next run continues after the cut (as RoBERTa's full sentences, Liu et al. 2019, but with rows of 128 filled, which would
    lose half a sentence each by ending at sentences). A share of the runs has a shorter, uniformly distributed length and ends at a
    sentence end if one fits. `word_start` is bool [vocab_size]; a word of more than a sixteenth of a row is cut.
    """
    edges = [0, *np.cumsum(encoded.document_sizes).tolist()]
    at = [0, *np.cumsum(encoded.sentence_lengths).tolist()]
    begins = np.append(word_start[encoded.tokens], True)
    # first token of the word at each position
    word = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0)).tolist()
    rows: list[tuple[int, int, int, int]] = []
    draws = _draw_uniform(rng, 2)
    for d in range(len(edges) - 1):
        position, end = at[edges[d]], at[edges[d + 1]]
        while position < end:
            short, target_draw = next(draws)
            if short < short_share:
                target = 2 + int(target_draw * (capacity - 1))
                stop = at[bisect_right(at, position + target, edges[d], edges[d + 1] + 1) - 1]
            else:
                target, stop = capacity, position
            if stop <= position:
                stop = min(position + target, end)
                if stop < end and word[stop] > max(position, stop - capacity // 16):
                    stop = word[stop]
            rows.append((position, stop, 0, 0))
            position = stop
    spans = np.array(rows, np.int64).reshape(-1, 4)
    return SequenceSpans(spans, np.full(len(spans), -1, np.int8))


def assemble(
    tokens: np.ndarray, spans: np.ndarray, labels: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of n sequences, ranges and labels as of `SequenceSpans`, with special tokens.

    Returns flat ids [sum of lengths], lengths int64 [n], and lengths of their `[CLS] A [SEP]` parts int64 [n].
    """
    sizes = spans[:, 1::2] - spans[:, ::2]  # (n, 2): tokens of A and B
    first = sizes[:, 0] + 2
    lengths = first + np.where(labels >= 0, sizes[:, 1] + 1, 0)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    flat = np.empty(int(lengths.sum()), tokens.dtype)
    ordinary = np.ones(len(flat), bool)
    for position, special in (
        (begins, tokenizer.cls_id),
        (begins + first - 1, tokenizer.sep_id),
        (ends - 1, tokenizer.sep_id),
    ):
        flat[position] = special
        ordinary[position] = False
    assert len(tokens) < 1 << 31, "32-bit places"
    flat[ordinary] = tokens[range_indices(spans[:, ::2].ravel(), sizes.ravel(), np.int32)]
    return flat, lengths, first


def sentence_limit(encoded: Encoded, capacity: int) -> int:
    """Most tokens of a sentence; 0: no limit."""
    lengths = encoded.sentence_lengths
    if lengths[lengths > LONG_ROWS * capacity].sum() <= LONG_SHARE * len(encoded.tokens):
        return 0
    return max(SHORTEST, capacity // PARTS)


def split_long(encoded: Encoded, limit: int, tokenizer: Tokenizer) -> Encoded:
    """The same documents with sentences of more than `limit` tokens split into parts of about `limit`, at most a quarter more.

    A part begins at the best position near one of equidistant ones: after a clause, else before a word.
    """
    lengths = encoded.sentence_lengths
    ends = np.cumsum(lengths)
    parts = -(-lengths // limit)
    sentence = np.repeat(np.arange(len(lengths)), parts - 1)  # of each cut
    middle = (ends - lengths)[sentence] + range_indices(1, parts - 1) * lengths[sentence] // parts[sentence]
    reach = max(1, limit // 8)
    near = np.arange(-reach, reach + 1)
    at = middle[:, None] + near  # (cuts, 2 reach + 1)
    after_clause = np.array([2.0 * _ends_clause(token) for token in tokenizer.tokens], np.float32)
    before_word = tokenizer.unit_start.astype(np.float32)
    value = after_clause[encoded.tokens[at - 1]] + before_word[encoded.tokens[at]] - np.abs(near) / (4 * reach)
    cuts = at[np.arange(len(at)), value.argmax(1)]
    edges = np.sort(np.concatenate([[0], ends, cuts]))
    document = np.repeat(np.arange(len(encoded.document_sizes)), encoded.document_sizes)[sentence]
    more = np.bincount(document, minlength=len(encoded.document_sizes))
    return Encoded(encoded.tokens, np.diff(edges), encoded.document_sizes + more)


def _ends_clause(token: str) -> bool:
    last = token.strip()[-1:]
    return bool(last) and unicodedata.category(last) in ("Po", "Pd", "Pe", "Pf") and last not in "'\"*#%&@/\\."


def check_totals(drawn: ItemResult, seq_len: int) -> None:
    """Raises TooLittleText if sequences of these totals fill no row; warns of many random pairs, truncated tokens or padding."""
    c = drawn.counts
    if c["tokens"] < seq_len:
        raise TooLittleText(
            f"--input: the corpus has only {c['tokens']} tokens, less than one row of {seq_len}; add more text"
        )
    if c["random next"] > MAX_RANDOM * c["pairs"]:
        log.warning(
            f"rows of {seq_len}: {c['random next'] / c['pairs']:.0%} of the pairs have a random second sentence, expected 50%: "
            f"documents have {c['sentences'] / max(1, c['documents']):.1f} sentences on average, and a single sentence has no "
            "next one (leave out --nsp for rows without pairs; --text-documents sets where documents end)"
        )
    tokens = c["corpus tokens"] + c["borrowed tokens"]
    if c["pairs"] and c["truncated tokens"] > MAX_TRUNCATED * tokens:
        log.warning(
            f"rows of {seq_len}: {c['truncated tokens'] / tokens:.0%} of the tokens are cut off: sentences have "
            f"{c['corpus tokens'] / max(1, c['sentences']):.0f} tokens on average (a longer --seq-len, a larger --vocab-size, or "
            "rows without --nsp, which lose none)"
        )
    most = c["tokens"] / c["sequences"] * packing.SLOTS[-1]
    if most < (1 - MAX_PADDING) * seq_len:
        log.warning(
            f"rows of {seq_len}: at least {1 - most / seq_len:.0%} of the rows is padding: sequences have "
            f"{c['tokens'] / c['sequences']:.0f} tokens on average, and a row has at most {packing.SLOTS[-1]} (a shorter --seq-len; "
            "--text-documents sets where documents end)"
        )

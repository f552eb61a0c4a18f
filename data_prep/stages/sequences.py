"""Sequences of one row length, drawn from the kept documents of a task, and checks of their totals.

Sequences are written in the order of a random 64-bit key, so that the global shuffle is a merge of key ranges. The sequences of a
task depend only on its documents, the options and its number. Held-out documents of several tasks make one unit, since one task
has too few to draw random sentences from. A sequence is ranges of a unit's tokens, which are copied when all are chosen.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from data_prep.common.arrays import choose_share
from data_prep.executor import work_files
from data_prep.executor.journal import Stage, Stages
from data_prep.executor.work_files import SEQUENCE, BuildJob, ItemResult, TooLittleText, Writer, total
from data_prep.stages import passages, read
from data_prep.tokens.encoder import Encoded
from megabert.common.logs import log
from megabert.data.tokenizer import Tokenizer

STREAM_TRAIN, STREAM_HELD = 0, 1
HELD_UNIT_TOKENS = 1 << 21
# sequences written together
AT_ONCE = 1 << 15
# [CLS] A [SEP] B [SEP], and [CLS] A [SEP]
PAIR_SPECIALS, SINGLE_SPECIALS = 3, 2
# random numbers drawn together
DRAWS = 4096
# Truncation of pairs loses most of a text without sentence ends (transcripts without punctuation, tables, a script with unknown
# marks). Sentences are split if more than LONG_SHARE of a unit's tokens are in sentences longer than LONG_ROWS rows, which does not
# occur in text with sentence ends; into PARTS parts a row, so that truncation loses little, of at least SHORTEST tokens.
LONG_ROWS, LONG_SHARE, PARTS, SHORTEST = 2, 0.2, 12, 8
# share of sequences with a shorter, uniformly distributed target length
SHORT_SHARE = 0.1
# shares of random pairs and of truncated tokens above which a build warns
MAX_RANDOM, MAX_TRUNCATED = 0.6, 0.2


@dataclass(frozen=True)
class KeptDocuments:
    """Kept documents of a task: numbers of documents in its units, its corpus, and the mask that applies ("" | keep | trim)."""

    task: int
    units: tuple[int, ...]
    corpus: int
    mask: str

    def load(self, job: BuildJob) -> list[tuple[np.ndarray, Encoded]]:
        """(DOCUMENT [d], documents) of each unit; dropped documents have size 0."""
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
class SequenceDraw:
    """Sequences of `seq_len` from `parts`; `kind` is train (one task) or heldout (a group of them)."""

    kind: str
    index: int
    seq_len: int
    parts: tuple[KeptDocuments, ...]


@dataclass(frozen=True)
class DrawnSequences:
    """The stage that drew sequences of `seq_len`, and the number of its first results that are of held-out documents."""

    seq_len: int
    stage: Stage
    held_runs: int

    @property
    def held(self) -> list[ItemResult]:
        return self.stage.results[: self.held_runs]

    @property
    def train(self) -> list[ItemResult]:
        return self.stage.results[self.held_runs :]


def run(
    stages: Stages, job: BuildJob, kept: list[KeptDocuments], held_tokens: list[int], seq_len: int
) -> DrawnSequences:
    """Draw all sequences of `seq_len`. `held_tokens` is truthy for tasks with held-out documents."""
    groups = held_groups(kept, held_tokens, seq_len)
    draws = [SequenceDraw("train", i, seq_len, (part,)) for i, part in enumerate(kept)]
    drawn = DrawnSequences(seq_len, stages.map(f"pairs {seq_len}", draw, job, [*groups, *draws]), len(groups))
    check(total(drawn.train), seq_len)
    return drawn


def held_groups(parts: list[KeptDocuments], held_tokens: list[int], seq_len: int) -> list[SequenceDraw]:
    """Groups of consecutive tasks whose held-out documents make about one unit."""
    groups: list[SequenceDraw] = []
    members: list[KeptDocuments] = []
    weight = 0
    for part, tokens in zip(parts, held_tokens, strict=True):
        if tokens:
            members.append(part)
            weight += tokens
        if weight >= HELD_UNIT_TOKENS or (members and part is parts[-1]):
            groups.append(SequenceDraw("heldout", len(groups), seq_len, tuple(members)))
            members, weight = [], 0
    return groups


def draw(job: BuildJob, item: SequenceDraw) -> ItemResult:
    """Write KIND-LENGTH-INDEX.{meta,ids}: SEQUENCE records ordered by key, and their ids in that order."""
    result = ItemResult()
    sources = None
    if item.kind == "train":
        units, stream = _train_units(job, item.parts[0], result), STREAM_TRAIN
    else:
        (units, sources), stream = _held_unit(job, item, result), STREAM_HELD
    parts: list[SequenceSpans] = []
    keys: list[np.ndarray] = []
    base = 0
    for number, unit in enumerate(units):
        seed = np.random.SeedSequence([job.options.seed, stream, item.seq_len, item.index, number])
        rng = np.random.Generator(np.random.Philox(seed))
        chosen = _choose(job, item.seq_len, unit, rng, result)
        chosen.spans += base
        base += len(unit.tokens)
        parts.append(chosen)
        keys.append(rng.integers(0, 1 << 64, len(chosen.labels), dtype=np.uint64))
        result.counts["corpus tokens"] += len(unit.tokens)
        result.counts["borrowed tokens"] += chosen.borrowed
        result.counts["truncated tokens"] += chosen.truncated
    _write(job, item, units, parts, keys, sources, result)
    return result


def _train_units(job: BuildJob, part: KeptDocuments, result: ItemResult) -> list[Encoded]:
    """Training documents of each unit, with a unit repeated by the weight of the corpus."""
    units = []
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
            result.counts["documents"] += documents
            result.counts["sentences"] += sentences
            if number:
                result.counts["repeated documents"] += documents
                result.counts["repeated sentences"] += sentences
                result.counts["repeated tokens"] += len(units[-1].tokens)
        result.counts["bytes"] += int(segments.bytes[full].sum())
    return [unit for unit in units if len(unit.tokens)]


def _held_unit(job: BuildJob, item: SequenceDraw, result: ItemResult) -> tuple[list[Encoded], np.ndarray]:
    """Held-out documents or passages as one unit, if there are any, and the source of each token, uint8 [t].

    Documents that are partly in the training data are counted there.
    """
    units, sources = [], [np.zeros(0, np.uint8)]
    for part in item.parts:
        for table, unit in part.load(job):
            segments = passages.split(job, table, unit)
            full = segments.encoded.document_sizes > 0
            held, trained = segments.held & full, ~segments.held & full
            units.append(segments.encoded.select(held))
            sources.append(np.repeat(table["source"][segments.document[held]], units[-1].document_tokens()))
            result.counts["documents"] += len(np.setdiff1d(segments.document[held], segments.document[trained]))
            result.counts["passages"] += int(held.sum())
            result.counts["sentences"] += int(segments.sentences[held].sum())
            result.counts["bytes"] += int(segments.bytes[held].sum())
    joined = Encoded.join(units, work_files.id_dtype(read.shared_encoder(job)[0]))
    return [joined] if len(joined.tokens) else [], np.concatenate(sources)


def _choose(job: BuildJob, seq_len: int, unit: Encoded, rng: np.random.Generator, result: ItemResult) -> SequenceSpans:
    tokenizer = read.shared_encoder(job)[0]
    if not job.options.nsp:
        return filled_rows(unit, seq_len - SINGLE_SPECIALS, SHORT_SHARE, tokenizer.word_start, rng)
    capacity = seq_len - PAIR_SPECIALS
    if limit := sentence_limit(unit, capacity):
        sentences = len(unit.sentence_lengths)
        unit = split_long(unit, limit, tokenizer)
        result.counts["split sentences"] += len(unit.sentence_lengths) - sentences
    return sentence_pairs(unit, capacity, SHORT_SHARE, rng)


def _write(
    job: BuildJob,
    item: SequenceDraw,
    units: list[Encoded],
    parts: list[SequenceSpans],
    keys: list[np.ndarray],
    sources: np.ndarray | None,
    result: ItemResult,
) -> None:
    """`sources`: of each token of `units`, uint8 [t], if they are recorded."""
    tokenizer = read.shared_encoder(job)[0]
    tokens = np.concatenate([np.zeros(0, work_files.id_dtype(tokenizer)), *(unit.tokens for unit in units)])
    spans = np.concatenate([np.zeros((0, 4), np.int64), *(part.spans for part in parts)])
    labels = np.concatenate([np.zeros(0, np.int8), *(part.labels for part in parts)])
    key = np.concatenate([np.zeros(0, np.uint64), *keys])
    order = np.argsort(key, kind="stable")
    stem = f"{item.kind}-{item.seq_len}-{item.index:07d}"
    written = 0
    with Writer(job, f"{stem}.meta", result) as metas, Writer(job, f"{stem}.ids", result) as ids:
        for first in range(0, len(order), AT_ONCE):
            few = order[first : first + AT_ONCE]
            flat, lengths, of_a = assemble(
                tokens, SequenceSpans(spans, labels), few, tokenizer.cls_id, tokenizer.sep_id
            )
            meta = np.zeros(len(few), SEQUENCE)
            meta["key"], meta["label"] = key[few], labels[few]
            meta["start"], meta["length"], meta["first"] = (written + np.cumsum(lengths) - lengths, lengths, of_a)
            if sources is not None:
                meta["sources"] = sources[spans[few][:, (0, 2)]]
            metas.write(meta)
            ids.write(flat)
            written += len(flat)
            result.count("tokens of a sequence", lengths)
    result.counts["sequences"] += len(order)
    result.counts["tokens"] += written
    result.counts["pairs"] += int((labels >= 0).sum())
    result.counts["random next"] += int((labels == 1).sum())


@dataclass
class SequenceSpans:
    """n sequences: half-open token ranges of A and B, int64 [n, 4]; label int8 [n]: 0 next, 1 random, -1 no B.

    Every token is in one A or one true B before truncation: sum of spans = tokens + borrowed - truncated. `borrowed`: tokens of
    random Bs before truncation.
    """

    spans: np.ndarray
    labels: np.ndarray
    borrowed: int = 0
    truncated: int = 0


def _document_edges(encoded: Encoded, halve: bool) -> list[int]:
    """Indices of the first sentences of documents, and the end; a single document is split into two halves."""
    sizes = encoded.document_sizes[encoded.document_sizes > 0]
    edges = [0, *np.cumsum(sizes).tolist()]
    if halve and len(edges) == 2 and edges[1] > 1:
        edges.insert(1, edges[1] // 2)
    return edges


def sentence_pairs(encoded: Encoded, capacity: int, short_share: float, rng: np.random.Generator) -> SequenceSpans:
    """A and B of each sequence, truncated to `capacity` tokens together.

    Source: Devlin et al. 2019, appendix A.2: sentences are collected up to a target length, which is the row's with probability 0.9
    and uniform in [2, row] with 0.1; a random sentence end among them ends A; in half of the cases (and always with a single
    sentence) B is a run of another document from a random sentence on, and the remaining sentences are used for the next sequence.
    Then the longer of A and B loses tokens, at its front or end with equal probability, until both fit. The target is drawn for
    each sequence, not once a document, so that a long document never becomes thousands of short sequences.

    B of a random pair comes from another document of `encoded`. A single document is treated as two halves; if it is a single
    sentence, B is that sentence again.
    """
    edges = _document_edges(encoded, halve=True)
    at = [0, *np.cumsum(encoded.sentence_lengths).tolist()]  # token offset of each sentence
    documents = len(edges) - 1
    rows: list[tuple[int, int, int, int]] = []
    labels: list[int] = []
    draws: list[list[float]] = []
    for d in range(documents):
        i, end = edges[d], edges[d + 1]
        while i < end:
            if not draws:
                draws = rng.random((DRAWS, 6)).tolist()
            short, target_draw, split, coin, other_draw, start_draw = draws.pop()
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
    edges = _document_edges(encoded, halve=False)
    at = [0, *np.cumsum(encoded.sentence_lengths).tolist()]
    places = np.arange(len(encoded.tokens) + 1)
    begins = np.append(word_start[encoded.tokens], True)
    word = np.maximum.accumulate(np.where(begins, places, 0)).tolist()  # first token of the word at each position
    rows: list[tuple[int, int, int, int]] = []
    draws: list[list[float]] = []
    for d in range(len(edges) - 1):
        position, end = at[edges[d]], at[edges[d + 1]]
        while position < end:
            if not draws:
                draws = rng.random((DRAWS, 2)).tolist()
            short, target_draw = draws.pop()
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
    tokens: np.ndarray, chosen: SequenceSpans, order: np.ndarray, cls_id: int, sep_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of the sequences `order` [n] of `chosen`, with special tokens.

    Returns flat ids [sum of lengths], lengths int64 [n], and lengths of their `[CLS] A [SEP]` parts int64 [n].
    """
    spans, labels = chosen.spans[order], chosen.labels[order]
    length_a, length_b = spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]
    first = length_a + 2
    lengths = first + np.where(labels >= 0, length_b + 1, 0)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    flat = np.empty(int(lengths.sum()), tokens.dtype)
    ordinary = np.ones(len(flat), bool)
    for position, special in ((begins, cls_id), (begins + first - 1, sep_id), (ends - 1, sep_id)):
        flat[position] = special
        ordinary[position] = False
    assert len(tokens) < 1 << 31, "32-bit places"
    sizes = np.stack([length_a, length_b], axis=1).ravel()
    starts = np.stack([spans[:, 0], spans[:, 2]], axis=1).ravel()
    source = np.repeat((starts - (np.cumsum(sizes) - sizes)).astype(np.int32), sizes)
    source += np.arange(len(source), dtype=np.int32)
    flat[ordinary] = tokens[source]
    return flat, lengths, first


def sentence_limit(encoded: Encoded, capacity: int) -> int:
    """Most tokens of a sentence; 0: no limit."""
    lengths = encoded.sentence_lengths
    if lengths[lengths > LONG_ROWS * capacity].sum() <= LONG_SHARE * len(encoded.tokens):
        return 0
    return max(SHORTEST, capacity // PARTS)


def _break_values(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [vocab]: value of a break after each token; the same before each token)."""
    after = [2.0 * _ends_clause(token) for token in tokenizer.tokens]
    return np.array(after, np.float32), tokenizer.unit_start.astype(np.float32)


def _ends_clause(token: str) -> bool:
    last = token.strip()[-1:]
    return bool(last) and unicodedata.category(last) in ("Po", "Pd", "Pe", "Pf") and last not in "'\"*#%&@/\\."


def split_long(encoded: Encoded, limit: int, tokenizer: Tokenizer) -> Encoded:
    """The same documents with sentences of more than `limit` tokens split into parts of about `limit`, at most a quarter more."""
    lengths = encoded.sentence_lengths
    cuts = _cuts(encoded, limit, tokenizer)
    ends = np.cumsum(lengths)
    edges = np.sort(np.concatenate([[0], ends, cuts]))
    sentence = np.searchsorted(ends, cuts, side="right")
    document = np.searchsorted(np.cumsum(encoded.document_sizes), sentence, side="right")
    more = np.bincount(document, minlength=len(encoded.document_sizes))
    return Encoded(encoded.tokens, np.diff(edges), encoded.document_sizes + more)


def _cuts(encoded: Encoded, limit: int, tokenizer: Tokenizer) -> np.ndarray:
    """int64 [c], ascending: first tokens of the parts, each the best position near one of equidistant ones."""
    lengths = encoded.sentence_lengths
    parts = -(-lengths // limit)
    inner = parts - 1
    sentence = np.repeat(np.arange(len(lengths)), inner)
    number = np.arange(inner.sum()) - np.repeat(np.cumsum(inner) - inner, inner) + 1
    starts = np.cumsum(lengths) - lengths
    middle = starts[sentence] + number * lengths[sentence] // parts[sentence]
    reach = max(1, limit // 8)
    near = np.arange(-reach, reach + 1)
    at = middle[:, None] + near  # (c, 2 reach + 1)
    after, before = _break_values(tokenizer)
    value = after[encoded.tokens[at - 1]] + before[encoded.tokens[at]] - np.abs(near) / (4 * reach)
    return at[np.arange(len(at)), value.argmax(1)] if len(at) else np.zeros(0, np.int64)


def check(drawn: ItemResult, seq_len: int) -> None:
    """Warn if the training sequences of `seq_len`, with totals `drawn`, are poor. Raises TooLittleText if they fill no row."""
    c = drawn.counts
    if c["tokens"] < seq_len:
        raise TooLittleText(
            f"--input: the corpus makes only {c['tokens']} tokens, less than one row of {seq_len}; give more text"
        )
    if c["random next"] > MAX_RANDOM * c["pairs"]:
        log.warning(
            f"rows of {seq_len}: {c['random next'] / c['pairs']:.0%} of the pairs have a random second part instead of half: "
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

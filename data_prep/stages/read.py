"""Reading: the documents of a task, cleaned, judged and encoded once for all row lengths.

A dropped document is counted under its reason with its sentences and tokens, so that totals read are the sums of kept and dropped
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from data_prep.common import utf8
from data_prep.common.arrays import choose_share, hash_bytes, segment_hashes, segment_sums
from data_prep.common.errors import Problems, printable
from data_prep.common.records import AUTO, ReadTask
from data_prep.executor import work_files
from data_prep.executor.work_files import DOCUMENT, KEYED, PARAGRAPH, TASK_SHIFT, BuildJob, ItemResult, Writer
from data_prep.filters import rules
from data_prep.readers.documents import read_documents
from data_prep.stages import minhash, texts
from data_prep.text import clean
from data_prep.tokens.encoder import DocumentBatch, Encoded, WordEncoder
from data_prep.tokens.word_cache import SharedWords
from megabert.common.logs import log
from megabert.data.tokenizer import Tokenizer

# bytes of text in a unit, within which random sentences are drawn
UNIT_BYTES = 8 << 20
# characters encoded at once: about 260,000 words
CHARACTERS_AT_ONCE = 3 << 19
# verdicts below 0, besides those of the quality rules
OTHER_REASONS = {-1: "empty", -2: "left out by weight"}
# verdict of the first reason of the user's filters; the next ones are below
OWN = -3
# blocks or lines of a document that may be documents
MANY_PARTS = 300

_encoders: dict[tuple[str, str, bool, bool], tuple[Tokenizer, WordEncoder, SharedWords]] = {}


def shared_encoder(job: BuildJob) -> tuple[Tokenizer, WordEncoder, SharedWords]:
    """The tokenizer, its word cache and the words shared with other workers, cached in the process."""
    key = (job.tokenizer, job.tokenizer_sha256, job.needs_folded(), job.needs_texts())
    if key not in _encoders:
        _encoders.clear()
        tokenizer = Tokenizer.load(job.tokenizer)
        encoder = WordEncoder(tokenizer, work_files.id_dtype(tokenizer), *key[2:])
        of_options = hash_bytes(repr(key[1:]).encode())
        _encoders[key] = (tokenizer, encoder, SharedWords(job.work, f"{of_options:016x}"))
    return _encoders[key]


class CleanDocument(NamedTuple):
    """Paragraphs of a cleaned document, the UTF-8 bytes of its raw text, its place and kind as of `RawDocument` and `FileRange`."""

    paragraphs: list[str]
    size: int
    path: str
    offset: int
    source: int
    kind: str

    def blocks_and_lines(self) -> tuple[int, int]:
        """The number of blocks between blank lines, and of lines (of wrapped text: of paragraphs)."""
        full = [bool(paragraph.strip()) for paragraph in self.paragraphs]
        return sum(b and not a for a, b in pairwise([False, *full])), sum(full)


def clean_documents(task: ReadTask, job: BuildJob, problems: Problems) -> Iterator[CleanDocument]:
    """The documents of a task."""
    for part in task.ranges:
        for document in read_documents(part, job.read, problems, job.work):
            # a Python literal can contain half a surrogate pair
            raw = document.text.encode("utf-8", "replace") if isinstance(document.text, str) else document.text
            try:
                text, glued = clean.decode(raw)
            except UnicodeDecodeError as error:
                if job.options.encoding_errors == "replace":
                    text, glued = clean.decode(utf8.decode(raw, job.read, problems, document.path).encode())
                else:
                    raw, bad = utf8.without_invalid_lines(raw)
                    at, size = document.offset + error.start, sum(map(len, bad))
                    problems.bad(document.path, at, "invalid UTF-8", utf8.INVALID, size=size, places=len(bad))
                    if not raw.strip():
                        continue
                    text, glued = clean.decode(raw)
            paragraphs = clean.paragraphs(text, document.markup, glued)
            yield CleanDocument(paragraphs, len(raw), document.path, document.offset, part.source, document.kind)


def read_task(job: BuildJob, task: ReadTask) -> ItemResult:
    """Read, judge and encode one task. Writes read-TASK.{documents,sentences,tokens} and keys for deduplication."""
    try:
        return _read_task(job, task)
    except BaseException:
        _encoders.clear()  # the encoder has half a task in it, and this process may continue with another build
        raise


def _read_task(job: BuildJob, task: ReadTask) -> ItemResult:
    result, problems = ItemResult(size=task.size), Problems(job.on_error)
    _, encoder, shared = shared_encoder(job)
    for words in shared.read_new():
        encoder.add_words(words)
    with _TaskFiles(job, task, result) as files:
        pending: list[CleanDocument] = []
        largest: CleanDocument | None = None
        for document in clean_documents(task, job, problems):
            if largest is None or document.size > largest.size:
                largest = document
            encoder.add(document.paragraphs)
            pending.append(document)
            if encoder.pending >= CHARACTERS_AT_ONCE:
                files.add(encoder.finish(), pending)
                pending = []
        if pending:
            files.add(encoder.finish(), pending)
    if new_words := encoder.take_new_words():
        shared.write(task.index, new_words)
    if largest is not None:
        blocks, lines = largest.blocks_and_lines()
        place = {"source": printable(largest.path), "document": largest.offset, "kind": largest.kind}
        result.facts["largest"] = {"bytes": largest.size, "blocks": blocks, "lines": lines, **place}
    result.problems, result.lost, result.changed = problems.counts, problems.lost, problems.changed
    for reason, documents in problems.dropped.items():
        result.dropped[reason] += documents
        result.counts["documents read"] += documents
    return result


def warn_of_large_documents(job: BuildJob, results: Sequence[ItemResult]) -> None:
    """Warn if the largest document of plain text may be many, unless an option says what a document is."""
    found = [result.facts["largest"] for result in results if result.facts.get("largest", {}).get("kind")]
    largest = max(found, key=lambda document: document["bytes"], default=None)
    if largest is None or job.options.text_documents != AUTO:
        return
    kind, parts = "line", "lines"
    if largest["blocks"] > 1:
        kind, parts = "blank-line", "blocks"
    if kind != largest["kind"] and largest[parts] >= MANY_PARTS:
        log.warning(
            f"{largest['source']}: 1 document of {largest['bytes'] / 1e6:.1f} MB has {largest[parts]:,} "
            f"{'blank-line blocks' if parts == 'blocks' else parts}; --text-documents {kind} makes each a document, "
            f"--text-documents {largest['kind']} keeps it"
        )


class _TaskFiles:
    """Writes the files of a task as its documents arrive."""

    def __init__(self, job: BuildJob, task: ReadTask, result: ItemResult) -> None:
        self._job, self._task, self._result = job, task, result
        self._weight = job.weights[task.corpus]
        self._limits, self._classifiers, self._functions = (
            job.options.rules,
            job.options.classifiers,
            job.options.functions,
        )
        self._stem = f"read-{task.index:07d}"
        # documents of each unit, and documents and bytes of the open one
        self._units: list[int] = []
        self._unit_bytes, self._unit_documents = 0, 0
        self._documents = 0
        # characters in [UNK] tokens of each file
        self._unknown: Counter[str] = Counter()
        # numbers of the documents' files
        self._sources: dict[str, int] = {}
        none = [np.zeros(0, KEYED)]
        self._keys = {name: list(none) for name in ("documents", "near") if name in job.options.dedup}

    def __enter__(self) -> _TaskFiles:
        names = ["documents", "sentences", "tokens"]
        if "near" in self._job.options.dedup:
            names.append("signatures")
        if "paragraphs" in self._job.options.dedup:
            names.append("paragraphs")
        if self._job.options.save_text:
            names += texts.NAMES
        self._files = {name: Writer(self._job, f"{self._stem}.{name}", self._result) for name in names}
        return self

    def add(self, batch: DocumentBatch, documents: list[CleanDocument]) -> None:
        """Judge documents, whose words are in `batch`, and write the kept ones."""
        result, job = self._result, self._job
        table = np.zeros(len(documents), DOCUMENT)
        table["hash"] = batch.words.document_hashes(job.options.seed)
        table["bytes"] = [document.size for document in documents]
        table["source"] = [document.source for document in documents]
        table["sentences"] = batch.encoded.document_sizes
        table["tokens"] = batch.encoded.document_tokens()
        result.counts["documents read"] += len(table)
        for unit in ("bytes", "sentences", "tokens"):
            result.counts[f"{unit} read"] += int(table[unit].sum())
        batch = self._drop_lines(batch, table)
        keep = self._judge(batch, table, documents)
        held_out = keep & (table["hash"] < job.held_limit)
        result.counts["held-out documents"] += int(held_out.sum())
        result.counts["held-out tokens"] += int(table["tokens"][held_out].sum())
        self._hash(batch, table, keep, documents)
        encoded = batch.encoded.select(keep)
        self._count_unknown(batch, keep, documents, encoded.tokens)
        self._files["documents"].write(table[keep])
        self._files["sentences"].write(encoded.sentence_lengths.astype(np.uint32))
        self._files["tokens"].write(encoded.tokens)
        if self._job.options.save_text:
            places = [(documents[i].path, documents[i].offset) for i in np.flatnonzero(keep).tolist()]
            texts.write(self._files, self._sources, places, encoded)
        for size in table["bytes"][keep].tolist():
            self._unit_bytes += size
            self._unit_documents += 1
            if self._unit_bytes >= UNIT_BYTES:
                self._end_unit()
        self._documents += int(keep.sum())

    def _drop_lines(self, batch: DocumentBatch, table: np.ndarray) -> DocumentBatch:
        """The documents without the lines dropped by rules of lines; updates `table`."""
        verdicts = rules.judge_lines(batch.words, self._limits)
        if not verdicts.any():
            return batch
        reasons, counts = np.unique(verdicts[verdicts > 0], return_counts=True)
        for number, count in zip(reasons.tolist(), counts.tolist(), strict=True):
            self._result.counts[f"lines: {rules.REASONS[number]}"] += count
        left = batch.select_paragraphs(verdicts == 0)
        tokens = left.encoded.document_tokens()
        dropped_sentences = int((table["sentences"] - left.encoded.document_sizes).sum())
        self._result.counts["dropped sentences"] += dropped_sentences
        self._result.counts["dropped tokens"] += int((table["tokens"] - tokens).sum())
        table["sentences"], table["tokens"] = left.encoded.document_sizes, tokens
        table["hash"] = left.words.document_hashes(self._job.options.seed)
        return left

    def _judge(self, batch: DocumentBatch, table: np.ndarray, documents: list[CleanDocument]) -> np.ndarray:
        """bool [d]: whether to keep a document; the others are counted under their reasons."""
        verdicts = rules.judge(batch.words, self._limits)
        codes = verdicts.astype(np.int64)
        codes[table["tokens"] == 0] = -1
        if self._weight < 1:
            codes[(codes == 0) & ~choose_share(table["hash"], self._weight)] = -2
        code_of: dict[str, int] = {}
        contents = batch.encoded.document_texts() if self._job.options.own_filters else []
        for classifier in self._classifiers:
            for i in np.flatnonzero(codes == 0).tolist():
                if not classifier.keeps(contents[i]):
                    codes[i] = code_of.setdefault(classifier.reason, OWN - len(code_of))
        for function in self._functions:
            for i in np.flatnonzero(codes == 0).tolist():
                document, tokens = documents[i], int(table["tokens"][i])
                metadata = {"source": document.path, "document": document.offset, "tokens": tokens}
                if reason := function.objection(contents[i], metadata):
                    codes[i] = code_of.setdefault(reason, OWN - len(code_of))
        reason_of = OTHER_REASONS | {code: reason for reason, code in code_of.items()}
        for code in np.unique(codes[codes != 0]).tolist():
            places = np.flatnonzero(codes == code)
            sentences, tokens = int(table["sentences"][places].sum()), int(table["tokens"][places].sum())
            reason = reason_of[code] if code < 0 else rules.REASONS[code]
            self._result.drop(reason, len(places), sentences, tokens)
        return codes == 0

    def _hash(self, batch: DocumentBatch, table: np.ndarray, keep: np.ndarray, documents: list[CleanDocument]) -> None:
        """Write the keys for finding duplicates of the kept documents."""
        job, options, dedup = self._job, self._job.options, self._job.options.dedup
        first = (self._task.index << TASK_SHIFT) + self._documents
        numbers = first + np.arange(int(keep.sum()), dtype=np.uint64)
        if "documents" in dedup:
            self._keys["documents"].append(work_files.keyed(table["hash"][keep], numbers))
        if "near" in dedup:
            form = shared_encoder(job)[0].form
            units = minhash.units(batch, [document.paragraphs for document in documents], form)
            signatures = minhash.signatures(units, options.near_words, options.near_characters)[keep]
            self._files["signatures"].write(signatures)
            bands = minhash.band_keys(signatures)
            self._keys["near"].append(work_files.keyed(bands.ravel(), np.repeat(numbers, bands.shape[1])))
        if "paragraphs" in dedup:
            full = batch.paragraph_sizes > 0
            edges = batch.words.paragraphs
            document = np.searchsorted(batch.words.documents, edges[:-1][full], side="right") - 1
            records = np.zeros(int(full.sum()), PARAGRAPH)
            long = segment_sums(batch.words.facts["characters"], edges) >= options.paragraph_characters
            records["hash"] = np.where(long, segment_hashes(batch.words.facts["hash"], edges), 0)[full]
            records["sentences"] = batch.paragraph_sizes[full]
            table["paragraphs"] = np.bincount(document, minlength=len(table))
            self._files["paragraphs"].write(records[keep[document]])

    def _count_unknown(
        self, batch: DocumentBatch, keep: np.ndarray, documents: list[CleanDocument], tokens: np.ndarray
    ) -> None:
        """Count [UNK] among the `tokens` of the kept documents, the characters in them, and those of each file."""
        words, counts = batch.words, self._result.counts
        characters, unknown = (
            keep * segment_sums(words.facts[name], words.documents) for name in ("characters", "unknown")
        )
        counts["kept tokens"] += len(tokens)
        counts["kept characters"] += int(characters.sum())
        counts["unknown tokens"] += int((tokens == shared_encoder(self._job)[0].unk_id).sum())
        counts["unknown characters"] += int(unknown.sum())
        for i in np.flatnonzero(unknown).tolist():
            self._unknown[documents[i].path] += int(unknown[i])

    def _end_unit(self) -> None:
        if self._unit_documents:
            self._units.append(self._unit_documents)
        self._unit_bytes, self._unit_documents = 0, 0

    def __exit__(self, *failed: Any) -> None:
        for file in self._files.values():
            file.__exit__(*failed)
        if failed[0] is not None:
            return
        self._end_unit()
        for name, parts in self._keys.items():
            records = work_files.by_key(np.concatenate(parts))
            work_files.write(self._job, f"{self._stem}.{name}-keys", records, self._result)
        self._result.facts["units"] = self._units
        self._result.facts["documents"] = self._documents
        self._result.facts["most unknown"] = self._unknown.most_common(1)
        if self._sources:
            self._result.facts["sources"] = list(self._sources)


def load(job: BuildJob, task: int, units: list[int]) -> tuple[np.ndarray, list[Encoded]]:
    """The kept documents of a task, DOCUMENT [d], and their number in each unit."""
    stem = f"read-{task:07d}"
    documents = work_files.read(job, f"{stem}.documents", DOCUMENT)
    sentences = work_files.read(job, f"{stem}.sentences", "uint32").astype(np.int64)
    tokens = work_files.read(job, f"{stem}.tokens", work_files.id_dtype(shared_encoder(job)[0]))
    sizes = documents["sentences"].astype(np.int64)
    parts, d, s, t = [], 0, 0, 0
    for count in units:
        d_end = d + count
        s_end = s + int(sizes[d:d_end].sum())
        t_end = t + int(sentences[s:s_end].sum())
        parts.append(Encoded(tokens[t:t_end], sentences[s:s_end], sizes[d:d_end]))
        d, s, t = d_end, s_end, t_end
    assert (d, s, t) == (len(documents), len(sentences), len(tokens)), f"{stem}: parts do not add up"
    return documents, parts

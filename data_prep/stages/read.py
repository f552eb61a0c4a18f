"""Reading stage: documents of a task are cleaned, filtered and encoded once for all row lengths.

Dropped documents, sentences and tokens are counted by reason, so the totals read are the sums of kept and dropped ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from data_prep.common import utf8
from data_prep.common.arrays import choose_share, segment_hashes, segment_sums
from data_prep.common.errors import Problems, printable
from data_prep.common.records import AUTO, TABLES, ReadTask
from data_prep.executor import work_files
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import BuildJob, ItemResult, appending, job_tokenizer, total
from data_prep.filters import rules
from data_prep.options import BuildOptions
from data_prep.readers import boundaries
from data_prep.readers.documents import EVALUATION_MEMBER, read_documents
from data_prep.stages import minhash, texts
from data_prep.stages.kept import DOCUMENT, KEYED, PARAGRAPH, keyed, numbers
from data_prep.text import clean
from data_prep.tokens.encoder import DocumentBatch, WordEncoder
from data_prep.tokens.word_cache import SharedWords
from megabert.common.logs import log
from megabert.data.tokenizer import WORD_START

STAGE = "read"
# characters encoded at once: about 260,000 words
CHARACTERS_AT_ONCE = 3 << 19
# a document with at least so many blocks or lines may in fact be many documents: warn
MANY_PARTS = 300


def run(stages: Stages, job: BuildJob, tasks: list[ReadTask]) -> list[ItemResult]:
    """Read all tasks; returns the result of each."""
    results = stages.map(STAGE, read_task, job, tasks, unit="B")
    log_guesses(results)
    warn_of_unused_options(job, results)
    warn_of_large_documents(job, results)
    return results


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
                decoded = clean.decode(raw)
            except UnicodeDecodeError as error:
                if job.options.encoding_errors == "replace":
                    decoded = clean.decode(utf8.decode(raw, job.read, problems, document.path).encode())
                else:
                    raw, bad = utf8.without_invalid_lines(raw)
                    at, size = document.offset + error.start, sum(map(len, bad))
                    problems.bad(document.path, at, "invalid UTF-8", utf8.INVALID, size=size, places=len(bad))
                    if not raw.strip():
                        continue
                    decoded = clean.decode(raw)
            text, glued, controls = decoded
            if controls:
                problems.changed["control characters, now spaces"] += controls
            paragraphs = clean.paragraphs(text, document.markup, glued)
            yield CleanDocument(paragraphs, len(raw), document.path, document.offset, part.source, document.kind)


@lru_cache(maxsize=1)
def _shared_encoder(job: BuildJob) -> tuple[WordEncoder, SharedWords]:
    """The encoder with its cache of words, and the words shared with other workers, of the process."""
    folded, with_texts = job.needs_folded(), job.options.save_text or bool(job.options.custom_filters)
    encoder = WordEncoder(job_tokenizer(job), work_files.id_dtype(job), folded, with_texts)
    key = f"{job.tokenizer_sha256[:16]}-{folded:d}{with_texts:d}"
    return encoder, SharedWords(job.work, key)


def read_task(job: BuildJob, task: ReadTask) -> ItemResult:
    """Read, judge and encode one task. Writes read-TASK.{documents,sentences,tokens} and keys for deduplication."""
    problems = Problems(job.on_error)
    result = ItemResult.of(problems, task.size)
    # so do published SentencePiece models; those that a build trains have another character for it
    loses_mark = len({tuple(ids) for ids in job_tokenizer(job).encode_batch([f"a{WORD_START}a", "a a"])}) == 1
    encoder, shared = _shared_encoder(job)
    for words in shared.read_new():
        encoder.add_words(words)
    pending: list[CleanDocument] = []
    largest: CleanDocument | None = None
    try:
        with ExitStack() as stack:
            files = _TaskFiles(job, task, result, stack)
            for document in clean_documents(task, job, problems):
                if largest is None or document.size > largest.size:
                    largest = document
                if loses_mark and (marks := sum(paragraph.count(WORD_START) for paragraph in document.paragraphs)):
                    problems.changed[f"{WORD_START}, a space to the tokenizer"] += marks
                encoder.add(document.paragraphs)
                pending.append(document)
                if encoder.pending >= CHARACTERS_AT_ONCE:
                    files.add(encoder.finish(), pending)
                    pending = []
            if pending:
                files.add(encoder.finish(), pending)
    except BaseException:
        _shared_encoder.cache_clear()  # the encoder holds documents of this task, and the process may run another build
        raise
    files.finish()
    if new_words := encoder.take_new_words():
        shared.write(task.index, new_words)
    if largest is not None:
        blocks, lines = largest.blocks_and_lines()
        place = {"source": printable(largest.path), "document": largest.offset, "kind": largest.kind}
        result.facts["largest"] = {"bytes": largest.size, "blocks": blocks, "lines": lines, **place}
    result.facts["guesses"] = {kind: [len(paths), *islice(paths, 1)] for kind, paths in problems.guesses.items()}
    result.counts["documents read"] += problems.dropped.total()
    result.dropped.update(problems.dropped)
    return result


def log_guesses(results: Sequence[ItemResult]) -> None:
    """A line for each kind of documents that was guessed while reading: of archives, and of files outside a folder's sample; a warning
    of archives with a test or validation split."""
    found: dict[str, list[tuple[int, str]]] = {}
    for result in results:
        for kind, (count, path) in result.facts["guesses"].items():
            found.setdefault(kind, []).append((count, path))
    for kind, guesses in found.items():
        more = sum(count for count, _ in guesses) - 1
        first = printable(guesses[0][1])
        where = first + f" and {more:,} more" * (more > 0)
        if kind == EVALUATION_MEMBER:
            log.warning(
                f"{where}: of a test or validation split, will be training text; to leave it out extract the archive"
            )
        else:
            log.info(boundaries.describe_guess(where, kind))


def warn_of_unused_options(job: BuildJob, results: Sequence[ItemResult]) -> None:
    """Warn of an option for formats that no file has."""
    formats = total(list(results)).formats.keys()
    for name, of in (("text_field", {"jsonl", "json", "csv", *TABLES}), ("text_documents", {"text"})):
        value = getattr(job.options, name)
        if value != getattr(BuildOptions, name) and formats and not formats & of:
            log.warning(
                f"--{name.replace('_', '-')} {value}: has no effect, since all files are {', '.join(sorted(formats))}"
            )


def warn_of_large_documents(job: BuildJob, results: Sequence[ItemResult]) -> None:
    """Warn if the largest plain-text document may be several documents, unless --text-documents was given."""
    found = [result.facts["largest"] for result in results if result.facts.get("largest", {}).get("kind")]
    if not found or job.options.text_documents != AUTO:
        return
    largest = max(found, key=lambda document: document["bytes"])
    kind, parts, shown = "line", "lines", "lines"
    if largest["blocks"] > 1:
        kind, parts, shown = "blank-line", "blocks", "blank-line blocks"
    if kind != largest["kind"] and largest[parts] >= MANY_PARTS:
        log.warning(
            f"{largest['source']}: 1 document of {largest['bytes'] / 1e6:.1f} MB has {largest[parts]:,} {shown}; "
            f"add --text-documents {kind} to split it, or --text-documents {largest['kind']} to keep it as one"
        )


class _TaskFiles:
    """Writes the files of a task, open in `stack`, as its documents arrive, and counts in `result`."""

    def __init__(self, job: BuildJob, task: ReadTask, result: ItemResult, stack: ExitStack) -> None:
        self._job, self._task, self._result = job, task, result
        self._stem, dedup = f"read-{task.index:07d}", job.options.dedup
        names = ["documents", "sentences", "tokens"]
        names += ["signatures"] * ("near" in dedup) + ["paragraphs"] * ("paragraphs" in dedup)
        names += texts.NAMES if job.options.save_text else ()
        self._files = {name: stack.enter_context(appending(job, f"{self._stem}.{name}", result)) for name in names}
        self._keys = {name: [np.zeros(0, KEYED)] for name in ("documents", "near") if name in dedup}
        # characters in [UNK] tokens of each file
        self._unknown: Counter[str] = Counter()
        # numbers of the documents' files
        self._sources: dict[str, int] = {}

    def add(self, batch: DocumentBatch, documents: list[CleanDocument]) -> None:
        """Judge documents, whose words are in `batch`, and write the kept ones."""
        job, counts = self._job, self._result.counts
        table = np.zeros(len(documents), DOCUMENT)
        table["hash"] = batch.words.document_hashes(job.options.seed)
        table["bytes"] = [document.size for document in documents]
        table["source"] = [document.source for document in documents]
        table["sentences"] = batch.encoded.document_sizes
        table["tokens"] = batch.encoded.document_tokens()
        counts["documents read"] += len(table)
        for unit in ("bytes", "sentences", "tokens"):
            counts[f"{unit} read"] += int(table[unit].sum())
        batch = self._drop_lines(batch, table)
        keep = self._judge(batch, table, documents)
        held_out = keep & (table["hash"] < job.held_limit)
        counts["held-out documents"] += int(held_out.sum())
        counts["held-out tokens"] += int(table["tokens"][held_out].sum())
        self._write_keys(batch, table, keep, documents)
        encoded = batch.encoded.select(keep)
        self._count_unknown(batch, keep, documents, encoded.tokens)
        self._files["documents"](table[keep])
        self._files["sentences"](encoded.sentence_lengths.astype(np.uint32))
        self._files["tokens"](encoded.tokens)
        if job.options.save_text:
            places = [(documents[i].path, documents[i].offset) for i in np.flatnonzero(keep).tolist()]
            texts.write(self._files, self._sources, places, encoded)
        counts["kept documents"] += int(keep.sum())

    def finish(self) -> None:
        """Write the sorted keys, and facts of the task."""
        for name, parts in self._keys.items():
            records = work_files.sort_by_key(np.concatenate(parts))
            work_files.write(self._job, f"{self._stem}.{name}-keys", records, self._result)
        most_unknown = [(printable(path), n) for path, n in self._unknown.most_common(1)]
        self._result.facts |= {"most unknown": most_unknown, "sources": list(map(printable, self._sources))}

    def _drop_lines(self, batch: DocumentBatch, table: np.ndarray) -> DocumentBatch:
        """The documents without the lines dropped by rules of lines; updates `table`."""
        verdicts = rules.judge_lines(batch.words, self._job.options.rules)
        if not verdicts.any():
            return batch
        counts = self._result.counts
        reasons, lines = np.unique(verdicts[verdicts > 0], return_counts=True)
        for number, count in zip(reasons.tolist(), lines.tolist(), strict=True):
            counts[f"lines: {rules.REASONS[number]}"] += count
        left = batch.select_paragraphs(verdicts == 0)
        sizes = {"sentences": left.encoded.document_sizes, "tokens": left.encoded.document_tokens()}
        for unit, size in sizes.items():
            counts[f"dropped {unit}"] += int((table[unit] - size).sum())
            table[unit] = size
        table["hash"] = left.words.document_hashes(self._job.options.seed)
        return left

    def _judge(self, batch: DocumentBatch, table: np.ndarray, documents: list[CleanDocument]) -> np.ndarray:
        """bool [d]: whether to keep a document; the others are counted under their reasons."""
        options, weight = self._job.options, self._job.weights[self._task.corpus]
        reasons = [*rules.REASONS, "empty", "left out by weight"]
        codes = rules.judge(batch.words, options.rules).astype(np.int64)  # indices of reasons
        codes[table["tokens"] == 0] = reasons.index("empty")
        if weight < 1:
            codes[(codes == 0) & ~choose_share(table["hash"], weight)] = reasons.index("left out by weight")
        contents = batch.encoded.document_texts() if options.custom_filters else []
        for i in np.flatnonzero(codes == 0).tolist() if options.custom_filters else ():
            document, tokens = documents[i], int(table["tokens"][i])
            metadata = {"source": document.path, "document": document.offset, "tokens": tokens}
            if reason := options.custom_filter_reason(contents[i], metadata):
                reasons += [reason] * (reason not in reasons)
                codes[i] = reasons.index(reason)
        for code in np.unique(codes[codes != 0]).tolist():
            self._result.drop(reasons[code], table[codes == code])
        return codes == 0

    def _write_keys(
        self, batch: DocumentBatch, table: np.ndarray, keep: np.ndarray, documents: list[CleanDocument]
    ) -> None:
        """Write the keys for finding duplicates of the kept documents, or collect those that are sorted at the end."""
        job, options = self._job, self._job.options
        of_kept = numbers(self._task.index, self._result.counts["kept documents"], int(keep.sum()))
        if "documents" in options.dedup:
            self._keys["documents"].append(keyed(table["hash"][keep], of_kept))
        if "near" in options.dedup:
            units = minhash.units(batch, [document.paragraphs for document in documents], job_tokenizer(job).form)
            signatures = minhash.signatures(units, options.near_words, options.near_characters)[keep]
            self._files["signatures"](signatures)
            bands = minhash.band_keys(signatures)
            self._keys["near"].append(keyed(bands.ravel(), np.repeat(of_kept, bands.shape[1])))
        if "paragraphs" in options.dedup:
            full = batch.paragraph_sizes > 0
            edges = batch.words.paragraphs
            document = np.searchsorted(batch.words.documents, edges[:-1][full], side="right") - 1
            records = np.zeros(int(full.sum()), PARAGRAPH)
            long = segment_sums(batch.words.facts["characters"], edges) >= options.paragraph_characters
            records["hash"] = np.where(long, segment_hashes(batch.words.facts["hash"], edges), 0)[full]
            records["sentences"] = batch.paragraph_sizes[full]
            table["paragraphs"] = np.bincount(document, minlength=len(table))
            self._files["paragraphs"](records[keep[document]])

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
        counts["unknown tokens"] += int((tokens == job_tokenizer(self._job).unk_id).sum())
        counts["unknown characters"] += int(unknown.sum())
        for i in np.flatnonzero(unknown).tolist():
            self._unknown[documents[i].path] += int(unknown[i])


def unknown(read: ItemResult) -> dict[str, Any]:
    """[UNK] tokens and the characters in them, and their shares of the documents that reading kept."""
    counts = {unit: read.counts[f"unknown {unit}s"] for unit in ("token", "character")}
    return {f"{unit}s": count for unit, count in counts.items()} | {
        f"{unit}_share": round(count / max(1, read.counts[f"kept {unit}s"]), 6) for unit, count in counts.items()
    }

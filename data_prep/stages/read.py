"""Reading: the documents of a task, cleaned, judged and encoded once, whatever is made of them later.

Nothing here depends on row lengths. A document that is dropped is counted under its reason together with its sentences
and tokens, so that what was read is what was kept and what was dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data_prep.common import hashing
from data_prep.common.errors import Problems
from data_prep.executor import work_files
from data_prep.executor.work_files import DOCUMENT, KEYED, PARAGRAPH, TASK_SHIFT, Done, Job, Writer
from data_prep.filters import quality, rules
from data_prep.readers.tasks import Task, read_piece
from data_prep.text import clean, masking, minhash
from data_prep.tokens.encoder import DocumentBatch, Encoded, WordEncoder
from data_prep.tokens.shared_words import SharedWords
from megabert.data.tokenizer import Tokenizer

UNIT_BYTES = 8 << 20  # of text: documents that random sentences are taken from one another
CHARACTERS_AT_ONCE = 3 << 19  # encoded together: about 260,000 words

_encoders: dict[tuple[str, str, str, bool], tuple[Tokenizer, WordEncoder, SharedWords]] = {}


def encoder_of(job: Job) -> tuple[Tokenizer, WordEncoder, SharedWords]:
    """The tokenizer, its word cache and those of other workers, kept for the life of the process; every build in a folder
    has the same path of it."""
    form = job.options.normalization
    folded = job.folds()
    key = (job.tokenizer, job.tokenizer_sha256, form, folded)
    if key not in _encoders:
        _encoders.clear()
        tokenizer = Tokenizer.load(job.tokenizer)
        encoder = WordEncoder(tokenizer, work_files.id_dtype(tokenizer), form, folded)
        of_options = hashing.of_bytes(repr(key[1:]).encode())
        _encoders[key] = (tokenizer, encoder, SharedWords(job.work, f"{of_options:016x}"))
    return _encoders[key]


class Text(NamedTuple):
    """A cleaned document; `size` is that of its text as it was read, in UTF-8 bytes."""

    paragraphs: list[str]
    size: int


def texts(task: Task, job: Job, done: Done, problems: Problems) -> Iterator[Text]:
    """The documents of a task."""
    clock = time.perf_counter
    before = clock()
    for piece in task.pieces:
        for document in read_piece(piece, job.options_of(task.corpus).read, problems, job.work):
            done.seconds["read"] += clock() - before
            before = clock()
            if isinstance(document.text, str):
                raw = document.text.encode("utf-8", "replace")  # JSON can spell half a surrogate pair
            else:
                raw = document.text
            try:
                text, nuls, controls, glued = clean.decode(raw)
            except UnicodeDecodeError as error:
                problems.bad(document.path, document.offset + error.start, "invalid UTF-8")
                before = clock()
                continue
            done.counts["nuls"] += nuls
            done.counts["control characters"] += controls
            if job.options.mask:
                text = masking.mask(text, job.options.mask, done.counts)
            paragraphs = clean.paragraphs(text, document.markup, done.counts, job.options.keep_whitespace, glued)
            found = Text(paragraphs, len(raw))
            done.seconds["clean"] += clock() - before
            yield found
            before = clock()
    done.seconds["read"] += clock() - before


def read_task(job: Job, task: Task) -> Done:
    """Read, judge and encode one task. Leaves read-TASK.{documents,sentences,tokens} and what deduplication needs."""
    try:
        return _read_task(job, task)
    except BaseException:
        _encoders.clear()  # half a task is in it, and this process may go on with another build
        raise


def _read_task(job: Job, task: Task) -> Done:
    done, problems = Done(size=task.size), Problems(job.on_error)
    _, encoder, shared = encoder_of(job)
    before = time.perf_counter()
    for words in shared.take():
        encoder.take_over(words)
    done.seconds["encode"] += time.perf_counter() - before
    with _TaskFiles(job, task, done) as out:
        pending: list[Text] = []
        clock = time.perf_counter
        for text in texts(task, job, done, problems):
            before = clock()
            encoder.add(text.paragraphs)
            done.seconds["encode"] += clock() - before
            pending.append(text)
            if encoder.pending >= CHARACTERS_AT_ONCE:
                out.add(_encode(encoder, done), pending)
                pending = []
        if pending:
            out.add(_encode(encoder, done), pending)
    before = time.perf_counter()
    if learnt := encoder.learnt():
        shared.give(task.index, learnt)
    done.seconds["encode"] += time.perf_counter() - before
    done.problems = problems.counts
    done.counts += problems.noted
    for reason, documents in problems.dropped.items():
        done.dropped[reason] += documents
        done.counts["documents read"] += documents
    return done


def _encode(encoder: WordEncoder, done: Done) -> DocumentBatch:
    before = time.perf_counter()
    batch = encoder.finish()
    done.seconds["encode"] += time.perf_counter() - before
    return batch


class _TaskFiles:
    """The files of a task as its documents arrive."""

    def __init__(self, job: Job, task: Task, done: Done) -> None:
        self._job, self._task, self._done = job, task, done
        self._weight = job.weights[task.corpus]
        own = job.options_of(task.corpus)
        self._rules, self._language = own.rules, own.language
        self._stem = f"read-{task.index:07d}"
        self._units: list[int] = []  # documents in each
        self._unit_bytes, self._unit_documents = 0, 0
        self._documents = 0
        none = [np.zeros(0, KEYED)]
        self._keys = {name: list(none) for name in ("documents", "near") if name in job.options.dedup}

    def __enter__(self) -> _TaskFiles:
        names = ["documents", "sentences", "tokens"]
        if "near" in self._job.options.dedup:
            names.append("signatures")
        if "paragraphs" in self._job.options.dedup:
            names.append("paragraphs")
        self._files = {name: Writer(self._job, f"{self._stem}.{name}", self._done) for name in names}
        return self

    def add(self, batch: DocumentBatch, texts: list[Text]) -> None:
        """Judge and keep documents, whose words `batch` holds."""
        done, job = self._done, self._job
        before = time.perf_counter()
        table = np.zeros(len(texts), DOCUMENT)
        table["hash"] = quality.document_hashes(batch.words, job.options.seed)
        table["bytes"] = [text.size for text in texts]
        table["sentences"] = batch.encoded.document_sizes
        table["tokens"] = batch.encoded.document_tokens()
        done.counts["documents read"] += len(table)
        done.counts["bytes read"] += int(table["bytes"].sum())
        done.counts["sentences read"] += int(table["sentences"].sum())
        done.counts["tokens read"] += int(table["tokens"].sum())
        batch = self._drop_lines(batch, table)
        keep = self._judge(batch, table, texts)
        done.seconds["judge"] += time.perf_counter() - before
        before = time.perf_counter()
        held = keep & (table["hash"] < job.held_limit)
        done.counts["held-out tokens"] += int(table["tokens"][held].sum())
        if keep.any():
            least = int(table["hash"][keep].min())
            done.facts["least hash"] = min(done.facts.get("least hash", least), least)
        self._hash(batch, table, keep)
        encoded = batch.encoded.select(keep)
        self._files["documents"].write(table[keep])
        self._files["sentences"].write(encoded.sentence_lengths.astype(np.uint32))
        self._files["tokens"].write(encoded.tokens)
        done.histogram("tokens of a document", table["tokens"][keep])
        done.histogram("tokens of a sentence", encoded.sentence_lengths)
        done.seconds["work files"] += time.perf_counter() - before
        for size in table["bytes"][keep].tolist():
            self._unit_bytes += size
            self._unit_documents += 1
            if self._unit_bytes >= UNIT_BYTES:
                self._end_unit()
        self._documents += int(keep.sum())

    def _drop_lines(self, batch: DocumentBatch, table: np.ndarray) -> DocumentBatch:
        """The documents without the lines that rules of lines drop; `table` is brought up to date."""
        verdicts = quality.judge_lines(batch.words, self._rules)
        if not verdicts.any():
            return batch
        reasons, counts = np.unique(verdicts[verdicts > 0], return_counts=True)
        for number, count in zip(reasons.tolist(), counts.tolist(), strict=True):
            self._done.counts[f"lines: {rules.REASONS[number]}"] += count
        left = batch.select_paragraphs(verdicts == 0)
        tokens = left.encoded.document_tokens()
        gone = int((table["sentences"] - left.encoded.document_sizes).sum())
        self._done.counts["dropped sentences"] += gone
        self._done.counts["dropped tokens"] += int((table["tokens"] - tokens).sum())
        table["sentences"], table["tokens"] = left.encoded.document_sizes, tokens
        table["hash"] = quality.document_hashes(left.words, self._job.options.seed)
        return left

    def _judge(self, batch: DocumentBatch, table: np.ndarray, texts: list[Text]) -> np.ndarray:
        """bool [d]: the documents to keep; the others are counted under their reasons."""
        verdicts = quality.judge(batch.words, self._rules)
        reasons = {number: rules.REASONS[number] for number in np.unique(verdicts[verdicts > 0]).tolist()}
        codes = verdicts.astype(np.int64)
        codes[table["tokens"] == 0] = -1
        reasons[-1] = "empty"
        if self._weight < 1:
            codes[(codes == 0) & ~hashing.chosen(table["hash"], self._weight)] = -2
            reasons[-2] = "left out by weight"
        quality_model, language = self._job.options.quality, self._language
        for number, reason, classifier in ((-4, "language", language), (-5, "model quality", quality_model)):
            if classifier:
                reasons[number] = reason
                for i in np.flatnonzero(codes == 0).tolist():
                    if not classifier.keeps(" ".join(texts[i].paragraphs)):
                        codes[i] = number
        for number, reason in reasons.items():
            here = np.flatnonzero(codes == number)
            few = [texts[i].paragraphs for i in here[: work_files.EXAMPLES].tolist()]
            examples = [" ".join(" ".join(paragraphs).split()) for paragraphs in few]
            self._done.drop(
                reason, len(here), int(table["sentences"][here].sum()), int(table["tokens"][here].sum()), examples
            )
        return codes == 0

    def _hash(self, batch: DocumentBatch, table: np.ndarray, keep: np.ndarray) -> None:
        """Keys that duplicates are found by, of the kept documents."""
        before = time.perf_counter()
        dedup = self._job.options.dedup
        first = (self._task.index << TASK_SHIFT) + self._documents
        numbers = first + np.arange(int(keep.sum()), dtype=np.uint64)
        if "documents" in dedup:
            self._keys["documents"].append(work_files.keyed(table["hash"][keep], numbers))
        if "near" in dedup:
            signatures = minhash.signatures(batch.words.facts["hash"], batch.words.documents)[keep]
            self._files["signatures"].write(signatures)
            bands = minhash.band_keys(signatures)
            self._keys["near"].append(work_files.keyed(bands.ravel(), np.repeat(numbers, bands.shape[1])))
        if "paragraphs" in dedup:
            full = batch.paragraph_sizes > 0
            edges = batch.words.paragraphs
            document = np.searchsorted(batch.words.documents, edges[:-1][full], side="right") - 1
            records = np.zeros(int(full.sum()), PARAGRAPH)
            records["hash"] = quality.paragraph_hashes(batch.words)[full]
            records["sentences"] = batch.paragraph_sizes[full]
            table["paragraphs"] = np.bincount(document, minlength=len(table))
            self._files["paragraphs"].write(records[keep[document]])
        self._done.seconds["hash"] += time.perf_counter() - before

    def _end_unit(self) -> None:
        if self._unit_documents:
            self._units.append(self._unit_documents)
        self._unit_bytes, self._unit_documents = 0, 0

    def __exit__(self, *failed: object) -> None:
        for file in self._files.values():
            file.__exit__()
        self._end_unit()
        for name, parts in self._keys.items():
            work_files.write(
                self._job, f"{self._stem}.{name}-keys", work_files.by_key(np.concatenate(parts)), self._done
            )
        self._done.facts["units"] = self._units
        self._done.facts["documents"] = self._documents


def load(job: Job, task: int, units: list[int]) -> tuple[np.ndarray, list[Encoded]]:
    """What `read_task` kept of a task: DOCUMENT [d] and the documents of each unit."""
    stem = f"read-{task:07d}"
    documents = work_files.read(job, f"{stem}.documents", DOCUMENT)
    sentences = work_files.read(job, f"{stem}.sentences", "uint32").astype(np.int64)
    tokens = work_files.read(job, f"{stem}.tokens", work_files.id_dtype(encoder_of(job)[0]))
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

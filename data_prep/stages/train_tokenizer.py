"""Reproducible training of a tokenizer on a bounded sample spread over the corpora.

The sample is the beginning of equidistant tasks, from each corpus in proportion to its bytes. The number of training threads is
fixed, since it determines the order of SentencePiece's floating-point sums.

A WordPiece vocabulary consists of the tokens of SentencePiece's merges of BERT's words. (The trainer of Hugging Face's tokenizers
depends on the order of a hash table, so two runs on the same text differ.)
"""

from __future__ import annotations

import copy
import io
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import ReadTask
from data_prep.executor import output_folder, work_files
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import BuildJob, ItemResult, TooLittleText
from data_prep.filters import rules
from data_prep.filters.measures import WordFacts
from data_prep.options import LEAST_VOCABULARY, BuildOptions
from data_prep.readers.tasks import unpacked_bytes
from data_prep.stages.read import CleanDocument, clean_documents
from data_prep.text import sentences
from data_prep.tokens.encoder import word_facts
from megabert.common.files import add_path_when_full, write_atomically
from megabert.common.logs import log
from megabert.data.text import Form, clean_word
from megabert.data.tokenizer import (
    CONTINUATION,
    ESCAPES,
    FORMS,
    RESERVED,
    SPECIAL_TOKENS,
    WORD_START,
    Casing,
    Tokenizer,
    turkic_rules,
)

SAMPLE, TRAIN = "sample", "train"
# prefix of the sentences of held-out documents, which train a tokenizer only where there are no others
HELD = "held"
# tasks sampled of a corpus
SAMPLED_TASKS = 128
THREADS = 2
# unigram scores are rounded to multiples of 1/256, so that fp32 sums are exact down to -65,536 (thousands of tokens)
STEPS = 256
# SentencePiece's names of the first special tokens
ROLES = ("pad", "unk", "bos", "eos")
# names of normal forms in a tokenizer's files by those of --normalization; in lower case they would be SentencePiece's own
FORM_NAMES = {"nfc": "NFC", "nfkc": "NFKC", "none": "none"}
# characters; longer sentences are cut
MAX_SENTENCE = 4096
# Letters of Turkish and Azerbaijani (about 7% of their texts' characters) that are rare in other languages. A text
# with at least TURKIC_SHARE of them is assumed to be in one of these languages.
TURKIC = "ıİğ"
TURKIC_SHARE = 0.01


@dataclass(frozen=True)
class SampleShare:
    """`size` bytes of text from the beginning of a task."""

    index: int
    task: ReadTask
    size: int


def run(stages: Stages, job: BuildJob, tasks: list[ReadTask], given: Tokenizer | None) -> Tokenizer:
    """The tokenizer of the build, in the work folder: a copy of the given one, or one trained on a sample."""
    if given is None:
        shares = sample_shares(tasks, job.options, job.weights)
        samples = stages.map(SAMPLE, sample, job, shares)
        try:
            stages.map(TRAIN, train_item, job, [len(shares)])
        except TooLittleText as error:
            error.read = work_files.total([ItemResult.from_json(one.facts["read"]) for one in samples])
            raise
        stages.consume(SAMPLE)
        _warn_of_casing(job.options, [result.counts for result in samples])
        return Tokenizer.load(job.path(output_folder.TOKENIZERS[job.options.kind]))
    for name, data in given.files().items():
        write_atomically(Path(job.path(name)), data)  # other jobs may be reading it
    same = copy.copy(given)
    same.path = Path(job.path(given.file_name))
    return same


def normal_form(options: BuildOptions) -> Form:
    """The normal form of a trained tokenizer's text, as of `clean_word`."""
    return FORMS[FORM_NAMES[options.normalization]]


def _warn_of_casing(options: BuildOptions, counts: Sequence[Mapping[str, int]]) -> None:
    letters, characters = (sum(of[name] for of in counts) for name in ("sampled Turkic letters", "sampled characters"))
    if options.lowercase and options.casing == "any" and letters >= TURKIC_SHARE * characters > 0:
        log.warning(
            f"--lowercase: {letters / characters:.1%} of the sample's characters are {', '.join(TURKIC)}, as in Turkish; --casing tr "
            "(az for Azerbaijani) makes I ı and İ i, without it they become i and i with a dot above"
        )


def sample_shares(tasks: list[ReadTask], options: BuildOptions, weights: Sequence[float]) -> list[SampleShare]:
    """The tasks to sample, equidistant in each corpus, and the bytes of text from each.

    The share of a corpus is its unpacked bytes times its weight.
    """
    shares: list[SampleShare] = []
    by_corpus = {c: [task for task in tasks if task.corpus == c] for c in sorted({task.corpus for task in tasks})}
    alone = len(by_corpus) == 1
    counts = {c: 1.0 if alone else unpacked_bytes(of_corpus) * weights[c] for c, of_corpus in by_corpus.items()}
    for corpus, of_corpus in by_corpus.items():
        count = min(len(of_corpus), SAMPLED_TASKS)
        size = int(options.sample_megabytes * 1_000_000 * counts[corpus] / sum(counts.values()) / count)
        shares += [
            SampleShare(len(shares) + i, of_corpus[i * len(of_corpus) // count], max(1, size)) for i in range(count)
        ]
    return shares


@dataclass
class _Sentences:
    """Sentences of a sample, a line each, until there are as many characters as there is `room` for."""

    room: int
    form: Form
    lines: list[str] = field(default_factory=list)

    def add(self, paragraphs: Sequence[str]) -> None:
        for paragraph in paragraphs:
            for sentence in sentences.split(paragraph):
                for at in range(0, len(sentence), MAX_SENTENCE):
                    words = sentence[at : at + MAX_SENTENCE].split(" ")
                    self.lines.append(" ".join(clean_word(word, self.form) for word in words))
                self.room -= len(sentence)
            if self.room <= 0:
                break


def sample(job: BuildJob, share: SampleShare) -> ItemResult:
    """Write sample-INDEX.txt: a sentence a line, without the documents that are filtered out; those that a hash of their words holds
    out are in held-INDEX.txt. Held-out passages, which are chosen later, may be in either."""
    # only for error messages: documents dropped here are counted again by the reading stage
    read, problems = ItemResult(), Problems(job.on_error)
    stream, left = clean_documents(share.task, job, problems), share.size
    trained, held_out = (_Sentences(share.size, normal_form(job.options)) for _ in range(2))
    while left > 0 and (some := list(_read_some(stream, left, job, read))):
        documents, words = _without_lines([document.paragraphs for document in some], job)
        verdicts = rules.judge(words, job.options.rules)
        read.dropped += Counter(rules.REASONS[verdict] for verdict in verdicts[verdicts > 0].tolist())
        held = words.document_hashes(job.options.seed) < job.held_limit
        # documents that rules drop are replaced by others
        for i in np.flatnonzero(verdicts == 0).tolist():
            read.dropped["empty"] += not any(map(str.strip, documents[i]))
            (held_out if held[i] else trained).add(documents[i])
            left -= some[i].size
    read.problems, read.lost = problems.counts, problems.lost
    read.dropped += problems.dropped
    read.counts["documents read"] += problems.dropped.total()
    result = ItemResult(facts={"read": read.as_json()})
    for kind, of in ((SAMPLE, trained), (HELD, held_out)):
        text = "".join(line + "\n" for line in of.lines)
        result.counts["sampled characters"] += len(text)
        result.counts["sampled Turkic letters"] += sum(map(text.count, TURKIC))
        work_files.write(job, f"{kind}-{share.index:06d}.txt", np.frombuffer(text.encode(), np.uint8), result)
    return result


def _read_some(stream: Iterator[CleanDocument], size: int, job: BuildJob, read: ItemResult) -> Iterator[CleanDocument]:
    """The next documents of so many bytes, without those that filters of the user drop, which `read` counts."""
    for document in stream:
        read.counts["documents read"] += 1
        if reason := _custom_filter_reason(document, job) if job.options.custom_filters else "":
            read.dropped[reason] += 1
            continue
        yield document
        size -= document.size
        if size <= 0:
            return


def _without_lines(documents: list[list[str]], job: BuildJob) -> tuple[list[list[str]], WordFacts]:
    """Documents without the lines dropped by rules of lines, and the facts of their words."""
    folded, form = job.needs_folded(), normal_form(job.options)
    kept = iter((rules.judge_lines(word_facts(documents, folded, form), job.options.rules) == 0).tolist())
    documents = [[paragraph for paragraph in paragraphs if next(kept)] for paragraphs in documents]
    return documents, word_facts(documents, folded, form)


def _custom_filter_reason(document: CleanDocument, job: BuildJob) -> str:
    """The reason for which one of the user's own filters drops a document, or "". Reading shows them neither empty ones nor those
    that rules drop."""
    options, left = job.options, document.paragraphs
    if options.rules:
        (left,), words = _without_lines([left], job)
        if rules.judge(words, options.rules).any():
            return ""
    form = normal_form(options)
    paragraphs = (" ".join(filter(None, (clean_word(w, form) for w in paragraph.split()))) for paragraph in left)
    text = "\n\n".join(filter(None, paragraphs))
    if not text:
        return ""
    # tokens are unknown before there is a tokenizer
    return options.custom_filter_reason(
        text, {"source": document.path, "document": document.offset, "tokens": len(text.split())}
    )


def train_item(job: BuildJob, count: int) -> ItemResult:
    """Write the tokenizer's files, trained on the samples 0 to count - 1."""
    lines: list[str] = []
    for kind in (SAMPLE, HELD):
        for index in range(count) if not lines else ():
            with open(job.path(f"{kind}-{index:06d}.txt"), encoding="utf-8", newline="\n") as file:
                lines += file.read().split("\n")[:-1]
    result = ItemResult()
    for name, data in train_files(lines, job.options).items():
        work_files.write(job, name, np.frombuffer(data, np.uint8), result)
    return result


def train_files(lines: list[str], options: BuildOptions) -> dict[str, bytes]:
    """The files of a tokenizer of the kind of `options`, by name. Raises BadInput as `train` does."""
    if options.kind == "sentencepiece":
        return {"tokenizer.model": train(lines, options)}
    return wordpiece_vocabulary(_parse(train(bert_words(lines, options), options)), options).files()


def train(lines: list[str], options: BuildOptions) -> bytes:
    """Bytes of a SentencePiece model with the five special tokens at ids 0 to 4; for WordPiece a BPE model.

    Raises BadInput for too little text for `vocab_size`, naming the largest possible size, and for too many characters.
    """
    model = io.BytesIO()
    if not lines:
        raise TooLittleText("--input: no text to train a tokenizer on")
    special: dict[str, Any] = {f"{role}_id": i for i, role in enumerate(ROLES)}
    special |= {f"{role}_piece": token for role, token in zip(ROLES, SPECIAL_TOKENS, strict=False)}
    # K, Q and ? can be rarer than the share that `character_coverage` leaves out
    required = "".join(c for c in ascii_letters + digits + punctuation if any(c in line for line in lines))
    try:
        with (
            add_path_when_full(Path(tempfile.gettempdir())),
            tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules_file,
        ):
            rules_file.write(_character_rules(options))
            rules_file.flush()
            sentencepiece.SentencePieceTrainer.train(
                # SentencePiece skips lines that contain ▅
                sentence_iterator=(line.translate(ESCAPES) for line in lines),
                model_writer=model,
                vocab_size=options.vocab_size,
                model_type="unigram" if options.model_type == "unigram" else "bpe",
                normalization_rule_tsv=rules_file.name,
                **special,
                control_symbols=["[MASK]"],
                character_coverage=options.character_coverage,
                required_chars=required.lower() if options.lowercase else required,
                max_sentence_length=4 * MAX_SENTENCE,
                num_threads=THREADS,
                minloglevel=2,
            )
    except RuntimeError as error:
        text = str(error)
        if least := re.search(r"smaller than required_chars.* vs (\d+)", text):
            raise _too_few(options, int(least.group(1))) from None
        largest = re.search(r"value <= (\d+)", text)
        if largest or "ocabulary size" in text or "vocab_size" in text:
            most = largest.group(1) if largest else ""
            hint = f"lower it{most and f' to at most {most}'}, or "
            hint = "" if most and int(most) < LEAST_VOCABULARY else hint
            raise TooLittleText(
                f"--vocab-size: {options.vocab_size} is too large for this corpus; {hint}add more text"
            ) from None
        raise
    proto = _parse(model.getvalue())
    proto.normalizer_spec.name = FORM_NAMES[options.normalization]
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    named = proto.SerializeToString()
    return exact(named) if options.model_type == "unigram" else named


def _character_rules(options: BuildOptions) -> str:
    """SentencePiece's table of replaced characters: a line each, of its code point, a tab and those of its replacement, in hex.

    Those that it reserves and, for a SentencePiece model, upper-case letters. Text in the form needs no others.
    """
    replaced = {chr(code): chr(escape) for code, escape in ESCAPES.items()}
    if options.lowercase and options.kind == "sentencepiece":
        from tokenizers import normalizers

        turkic = turkic_rules() if options.casing != "any" else []
        lower = normalizers.Sequence([*turkic, normalizers.Lowercase()]).normalize_str  # as an exported one does it
        letters = [*map(chr, (*range(ord("A"), 0xD800), *range(0xE000, sys.maxunicode + 1)))]
        pairs = zip(letters, lower("\n".join(letters)).split("\n"), strict=True)
        replaced |= {c: low for c, low in pairs if low != c}
    return "".join(f"{ord(c):X}\t{' '.join(f'{ord(part):X}' for part in by)}\n" for c, by in replaced.items())


def _too_few(options: BuildOptions, least: int) -> BadInput:
    return BadInput(
        f"--vocab-size: {options.vocab_size} is too small: the corpus' characters alone need {least}; "
        "raise it, or lower --character-coverage"
    )


def _parse(model: bytes) -> Any:
    """The protocol buffer of a SentencePiece model."""
    messages: Any = sentencepiece_model_pb2  # its classes are created at import
    return messages.ModelProto.FromString(model)


def exact(model: bytes) -> bytes:
    """A unigram model with scores rounded such that their sums are exact in fp32.

    The choice between two segmentations of similar score is then independent of the text around a word and of the library:
    SentencePiece and Hugging Face's tokenizers search in the same order.
    """
    proto = _parse(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * STEPS) / STEPS
    return proto.SerializeToString()


def _casing(options: BuildOptions) -> Casing:
    return Casing(
        lowercase=options.lowercase,
        strip_accents=False,
        turkic=options.casing != "any",
        form=FORM_NAMES[options.normalization],
    )


def bert_words(lines: list[str], options: BuildOptions) -> list[str]:
    """Lines split by BERT's rules: words separated by spaces, lower-cased on request, with accents."""
    normalizer = _casing(options).normalizer()
    from tokenizers import pre_tokenizers

    splitter = pre_tokenizers.BertPreTokenizer()
    normal = (normalizer.normalize_str(line) for line in lines)
    return [" ".join(word for word, _ in splitter.pre_tokenize_str(line)) for line in normal]


def wordpiece_vocabulary(model: Any, options: BuildOptions) -> Tokenizer:
    """A tokenizer from a parsed SentencePiece BPE model of such words, with its merges in order.

    Every character of the model has a token to begin a word and one to continue it, so known characters are never [UNK]. If these
    exceed `vocab_size`, characters that BERT's tokenizer splits into separate words (ideographs, punctuation) only have the first.
    Raises BadInput naming the smallest size if these still exceed it.
    """
    tokens = [piece.piece for piece in model.pieces if piece.type == 1]
    characters = sorted(token for token in tokens if len(token) == 1 and token != WORD_START)
    inner = characters
    if len(SPECIAL_TOKENS) + len(characters) + len(inner) > options.vocab_size:
        inner = [c for c in characters if bert_words([f"a{c}a"], options) != [f"a {c} a"]]
    vocabulary = dict.fromkeys((*SPECIAL_TOKENS, *characters, *(CONTINUATION + c for c in inner)))
    if len(vocabulary) > options.vocab_size:
        raise _too_few(options, len(vocabulary))
    for token in tokens:
        if len(vocabulary) >= options.vocab_size:
            break
        if len(token) > 1:
            bare = token.removeprefix(WORD_START)
            vocabulary[bare if token != bare else CONTINUATION + bare] = None
    text = "".join(f"{token}\n" for token in vocabulary).translate(RESERVED)
    return Tokenizer.parse(text.encode(), Path("vocab.txt"), asdict(_casing(options)))

"""Training of a tokenizer on a bounded sample spread over the corpora, to the same bytes each time.

The sample is the opening of tasks at even distances. A corpus gets a share of it that grows with its bytes to the power
`sample_alpha`: 1 is its natural share, 0 an equal one, and 0.3 what multilingual models take so that small languages are
heard (Conneau et al. 2020, section 3.1). The number of training threads is fixed: it decides in which order SentencePiece
adds its floating-point sums.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from data_prep.common.errors import BadInput, Problems
from data_prep.executor import work_files
from data_prep.executor.work_files import Done, Job
from data_prep.filters import quality
from data_prep.options import BuildOptions
from data_prep.readers.tasks import Task, unpacked_bytes
from data_prep.stages import train_wordpiece
from data_prep.stages.read import texts
from data_prep.stages.train_wordpiece import too_few
from data_prep.text import clean, sentences
from data_prep.tokens.encoder import word_facts
from megabert.data.tokenizer import KEPT_BLANKS

SAMPLED_TASKS = 128  # of a corpus
THREADS = 2
STEPS = 256  # of a unigram score in 1: fp32 sums are then exact down to -65,536, some thousand pieces
MAX_SENTENCE = 4096  # characters; longer ones are cut


@dataclass(frozen=True)
class Share:
    """`size` bytes of text from the opening of a task."""

    index: int
    task: Task
    size: int


def shares(tasks: list[Task], options: BuildOptions, weights: Sequence[float]) -> list[Share]:
    """The tasks to sample, at even distances in each corpus, and the bytes of text to take from each.

    A corpus counts with its unpacked bytes times its weight.
    """
    found: list[Share] = []
    by_corpus = {c: [task for task in tasks if task.corpus == c] for c in sorted({task.corpus for task in tasks})}
    alone = len(by_corpus) == 1
    counts = {
        c: 1.0 if alone else (unpacked_bytes(its) * weights[c]) ** options.sample_alpha for c, its in by_corpus.items()
    }
    for corpus, its in by_corpus.items():
        count = min(len(its), SAMPLED_TASKS)
        size = int(options.sample_megabytes * 1_000_000 * counts[corpus] / sum(counts.values()) / count)
        found += [Share(len(found) + i, its[i * len(its) // count], max(1, size)) for i in range(count)]
    return found


def sample(job: Job, share: Share) -> Done:
    """Write sample-INDEX.txt: a sentence a line, without those of documents that are held out or filtered."""
    documents: list[list[str]] = []
    size = share.size
    # What is wrong with the input is counted by the build itself, so that it is counted once.
    for text in texts(share.task, job, Done(), Problems(job.on_error)):
        size -= text.size
        documents.append(text.paragraphs)
        if size <= 0:
            break
    options = job.options
    facts_of = partial(
        word_facts, form=options.normalization, folded=job.folds(), keep_whitespace=options.keep_whitespace
    )
    words = facts_of(documents)
    rules = job.options_of(share.task.corpus).rules
    kept = iter((quality.judge_lines(words, rules) == 0).tolist())
    documents = [[paragraph for paragraph in paragraphs if next(kept)] for paragraphs in documents]
    words = facts_of(documents)
    wanted = quality.judge(words, rules) == 0
    wanted &= quality.document_hashes(words, job.options.seed) >= job.held_limit
    lines: list[str] = []
    size = share.size
    for i in np.flatnonzero(wanted).tolist():
        for paragraph in documents[i]:
            for sentence in _lines_of(paragraph) if options.keep_whitespace else sentences.split(paragraph):
                cut = sentence[:MAX_SENTENCE].split(" ")
                lines.append(" ".join(clean.clean_word(word, job.options.normalization) for word in cut))
                size -= len(sentence)
            if size <= 0:
                break
    done = Done()
    data = "".join(line + "\n" for line in lines).encode()
    work_files.write(job, f"sample-{share.index:06d}.txt", np.frombuffer(data, np.uint8), done)
    return done


def _lines_of(paragraph: str) -> list[str]:
    """Lines of a paragraph that keeps its whitespace, each after a tab.

    A tab is a symbol, as a line end is, which parts a line from the space that SentencePiece puts before it: what is learned
    of indented lines then holds for them where they stand.
    """
    return ["\t" + line for line in paragraph.split("\n") if line.strip(clean.BLANKS)]


def train_item(job: Job, count: int) -> Done:
    """Write the tokenizer's files, trained on the samples 0 to count - 1."""
    lines: list[str] = []
    for index in range(count):
        with open(job.path(f"sample-{index:06d}.txt"), encoding="utf-8", newline="\n") as file:
            lines += file.read().split("\n")[:-1]
    done = Done()
    for name, data in train_files(lines, job.options).items():
        work_files.write(job, name, np.frombuffer(data, np.uint8), done)
    return done


def train_files(lines: list[str], options: BuildOptions) -> dict[str, bytes]:
    """The files of a tokenizer of the kind that `options` ask for, by name. Raises BadInput as `train` does."""
    if options.kind == "sentencepiece":
        return {"tokenizer.model": train(lines, options)}
    merges = replace(options, model_type="bpe", lowercase=False, model_form="none")
    model = train(train_wordpiece.words_of(lines, options), merges)
    return train_wordpiece.vocabulary(parsed(model), options).files()


def train(lines: list[str], options: BuildOptions) -> bytes:
    """Bytes of a SentencePiece model with the five special pieces at ids 0 to 4.

    Raises BadInput when the text has too little in it for `vocab_size`, naming the largest size that works, or more
    characters than that.
    """
    model = io.BytesIO()
    if not lines:
        raise BadInput("--input: no text to train a tokenizer on (every file or document is empty)")
    # A model lists the options that it was given: none that was not asked for.
    given: dict[str, Any] = {"byte_fallback": True} if options.byte_fallback else {}
    if options.keep_whitespace:
        given |= {"user_defined_symbols": list(KEPT_BLANKS), "remove_extra_whitespaces": False}
        given["allow_whitespace_only_pieces"] = True
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=options.vocab_size,
            model_type=options.model_type,
            normalization_rule_name=_rule(options),
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            bos_piece="[CLS]",
            eos_piece="[SEP]",
            control_symbols=["[MASK]"],
            character_coverage=options.character_coverage,
            **given,
            max_sentence_length=4 * MAX_SENTENCE,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        text = str(error)
        if least := re.search(r"smaller than required_chars.* vs (\d+)", text):
            raise too_few(options, int(least.group(1))) from None
        largest = re.search(r"value <= (\d+)", text)
        if largest or "ocabulary size" in text or "vocab_size" in text:
            hint = f"; the largest that works is {largest.group(1)}" if largest else ""
            raise BadInput(
                f"--vocab-size: {options.vocab_size} pieces are more than the corpus gives{hint}, or give more text"
            ) from None
        raise
    made = exact(model.getvalue()) if options.model_type == "unigram" else model.getvalue()
    return named(made, "nfc") if options.model_form == "NFC" else made


def _rule(options: BuildOptions) -> str:
    """SentencePiece's name of what the model does to characters. What is NFC comes to it so."""
    if options.model_form != "NFKC":
        return "identity"
    return "nmt_nfkc_cf" if options.lowercase else "nmt_nfkc"


def parsed(model: bytes) -> Any:
    """The protocol buffer that a SentencePiece model is."""
    messages: Any = sentencepiece_model_pb2  # its classes are made at import
    return messages.ModelProto.FromString(model)


def named(model: bytes, form: str) -> bytes:
    """A model that says which form its text is to have: the library has no rule of that name, and reads none."""
    proto = parsed(model)
    proto.normalizer_spec.name = form
    return proto.SerializeToString()


def exact(model: bytes) -> bytes:
    """A unigram model whose scores are rounded so that their sums are exact in fp32, as they are in fp64.

    Which of two segmentations that score nearly alike wins then depends neither on the text around a word nor on the
    library: SentencePiece and Hugging Face's tokenizers search in the same order.
    """
    proto = parsed(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * STEPS) / STEPS
    return proto.SerializeToString()

"""A tokenizer is trained on a bounded sample spread over the corpus and comes out the same bytes each time.

The sample is the opening of tasks at even distances. The number of training threads is fixed: it decides
in which order SentencePiece adds its floating-point sums.
"""

from __future__ import annotations

import io
import re
from itertools import chain

import sentencepiece

from data_prep import clean, sentences
from data_prep.options import BuildOptions
from data_prep.problems import BadInput, Problems
from data_prep.sources import Task
from data_prep.units import Done, Job, texts

SAMPLED_TASKS = 128
THREADS = 2
MAX_SENTENCE = 4096  # characters; longer ones are cut


def shares(tasks: list[Task], options: BuildOptions) -> list[tuple[Task, int]]:
    """The tasks to sample, at even distances, and the bytes of text to take from each."""
    count = min(len(tasks), SAMPLED_TASKS)
    size = options.sample_megabytes * 1_000_000 // count
    return [(tasks[i * len(tasks) // count], size) for i in range(count)]


def sample(job: Job, share: tuple[Task, int]) -> tuple[str, ...]:
    """Sentences from the opening of one task, held-out documents left out."""
    task, size = share
    found: list[str] = []
    # What is wrong with the input is counted by the build itself, so that it is counted once.
    for paragraphs, hash_, _ in texts(task, job, Done(), Problems(job.options.on_error)):
        if hash_ < job.held_limit:
            continue
        for paragraph in paragraphs:
            for sentence in sentences.split(paragraph):
                found.append(" ".join(clean.clean_word(word) for word in sentence[:MAX_SENTENCE].split(" ")))
                size -= len(sentence)
            if size <= 0:
                return tuple(found)
    return tuple(found)


def train(samples: list[tuple[str, ...]], options: BuildOptions) -> bytes:
    """Bytes of a SentencePiece model with the five special pieces at ids 0 to 4.

    Raises BadInput when the text has too little in it for `vocab_size`, naming the largest size that works.
    """
    model = io.BytesIO()
    if not any(samples):
        raise BadInput("--input: no text to train a tokenizer on (every file or document is empty)")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain.from_iterable(samples),
            model_writer=model,
            vocab_size=options.vocab_size,
            model_type=options.model_type,
            normalization_rule_name="nmt_nfkc_cf" if options.lowercase else "nmt_nfkc",
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            bos_piece="[CLS]",
            eos_piece="[SEP]",
            control_symbols=["[MASK]"],
            character_coverage=0.9995,
            max_sentence_length=4 * MAX_SENTENCE,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        text = str(error)
        largest = re.search(r"value <= (\d+)", text) or re.search(r"smaller than.* (\d+)", text)
        if largest or "ocabulary size" in text or "vocab_size" in text:
            hint = f"; the largest that works is {largest.group(1)}" if largest else ""
            raise BadInput(
                f"--vocab-size: {options.vocab_size} pieces are more than the corpus gives{hint}, or give more text"
            ) from None
        raise
    return model.getvalue()

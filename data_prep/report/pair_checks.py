"""Checks of a build before rows are written: what makes none or trains a poor model is said, with its cause and what helps."""

from __future__ import annotations

from data_prep.common.errors import BadInput, Unfinished
from data_prep.executor.work_files import Done
from megabert.common.logs import log

MAX_RANDOM, MAX_TRUNCATED = 0.6, 0.2  # shares of the pairs and of the tokens
FEWEST = 1000  # pairs; fewer are only warned of: a sample, whose shares say little of the whole
SHORTEST = 128  # tokens of a row; shorter ones are only warned of: BERT's pairs cut off a fifth there in any language


def check(drawn: Done, seq_len: int, allow: bool) -> None:
    """`drawn` is the sum of what drawing the sequences of `seq_len` reported.

    Raises BadInput where it makes no row, and Unfinished where it makes poor ones: the same command with --allow goes on.
    """
    if drawn.counts["tokens"] < seq_len:
        raise BadInput(
            f"--input: the corpus makes only {drawn.counts['tokens']} tokens, less than one row of {seq_len}; give more text"
        )
    found = [text for text in (_random(drawn), _truncated(drawn, seq_len)) if text]
    if not found:
        return
    said = f"rows of {seq_len}: " + "; ".join(found)
    if allow or drawn.counts["pairs"] < FEWEST or seq_len < SHORTEST:
        log.warning(said)
        return
    raise Unfinished(
        f"{said}. Nothing was written; --allow takes it as it is and goes on from here, "
        "other options begin anew with --overwrite"
    )


def _random(drawn: Done) -> str:
    pairs, random = drawn.counts["pairs"], drawn.counts["random next"]
    if random <= MAX_RANDOM * pairs:
        return ""
    sentences = drawn.counts["sentences"] / max(1, drawn.counts["documents"])
    return (
        f"{random / pairs:.0%} of the pairs have a random second part, where half should: documents have {sentences:.1f} "
        "sentences on average, and what fits no second one has no next (--no-nsp makes no pairs; --text-documents says what a "
        "document is; --max-sentence N splits long sentences)"
    )


def _truncated(drawn: Done, seq_len: int) -> str:
    tokens = drawn.counts["corpus tokens"] + drawn.counts["borrowed tokens"]
    lost = drawn.counts["truncated tokens"]
    if not drawn.counts["pairs"] or lost <= MAX_TRUNCATED * tokens:
        return ""
    length = drawn.counts["corpus tokens"] / max(1, drawn.counts["sentences"])
    return (
        f"{lost / tokens:.0%} of the tokens are cut off, because sentences have {length:.0f} tokens on average (--seq-len "
        f"{4 * seq_len} or so, a larger --vocab-size, --max-sentence {max(8, seq_len // 8)}, or --no-nsp, which cuts off none)"
    )

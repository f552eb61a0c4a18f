"""Masks of whole words and of spans: against a walk in plain Python, never in part, evenly drawn, with every vocabulary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabert.config import MaskingConfig
from megabert.data.masking import Masked, MaskingVocabulary, mask
from megabert.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.helpers import fast_tokenizers, runs, streams
from tests.helpers.rows import VOCAB, make_rows, vocabulary

STARTS = [token > 4 and token % 10 < 7 for token in range(VOCAB)]  # of `vocabulary()`
BOTH = pytest.mark.parametrize("strategy", ["word", "span"])


def masked(ids: np.ndarray, bounds: np.ndarray, strategy: str, known: MaskingVocabulary, **options: Any) -> Masked:
    masking = MaskingConfig(strategy=strategy, **options)  # type: ignore[arg-type]
    return mask(ids, bounds, np.arange(len(ids)), seed=11, epoch=2, vocabulary=known, masking=masking)


def chosen(out: Masked, row: int) -> list[int]:
    return out.positions[row, : out.counts[row]].tolist()


def one_sequence(tokens: list[int], copies: int) -> tuple[np.ndarray, np.ndarray]:
    """`copies` rows of `[CLS] tokens [SEP]`."""
    ids = np.array([[2, *tokens, 3]] * copies, np.uint16)
    return ids, np.full((copies, 1, 2), ids.shape[1], np.uint16)


def list_runs(positions: list[int]) -> list[list[int]]:
    """Neighbouring positions together."""
    found: list[list[int]] = []
    for position in positions:
        if found and position == found[-1][-1] + 1:
            found[-1].append(position)
        else:
            found.append([position])
    return found


# -- a walk in plain Python -----------------------------------------------------------------------------------------


def hash32(key: int, counter: int) -> int:
    low, high, top = key % 2**32, key >> 32, 2**32
    x = (low + counter * 0x9E3779B9) % top
    x = (x ^ x >> 16) * 0x7FEB352D % top ^ high
    x = (x ^ x >> 15) * 0x846CA68B % top
    return x ^ x >> 16


def segments_of(ids: list[int], lengths: list[int]) -> list[list[list[list[int]]]]:
    """Of each sequence its segments, of each segment its words, of each word its positions."""
    sequences, at = [], 0
    for length in lengths:
        segments: list[list[list[int]]] = [[]]
        for position in range(at, at + length):
            if ids[position] < 5:
                segments.append([])
            elif not segments[-1] or STARTS[ids[position]]:
                segments[-1].append([position])
            else:
                segments[-1][-1].append(position)
        sequences.append(segments)
        at += length
    return sequences


def span_words(random: int) -> int:
    """The length whose share of all lengths, in order, contains the random number of 32 bits."""
    shares, below = [0.8**k for k in range(10)], 0.0
    for words, share in enumerate(shares, 1):
        below += share / sum(shares)
        if (random >> 16) / 2**16 < below:
            return words
    raise AssertionError


def expected(ids: list[int], lengths: list[int], key: int, strategy: str, rate: float, capacity: int) -> list[int]:
    sequences = segments_of(ids, lengths)
    maskable = [sum(len(word) for segment in segments for word in segment) for segments in sequences]
    share, offset = min(rate, capacity / sum(maskable)), (key >> 40) / 2**24
    used, total, found, before = 0, 0, [], 0
    for segments, tokens in zip(sequences, maskable, strict=True):
        total += tokens
        rounded = int(total * share + offset)
        budget = min(max(rounded - before, tokens > 0), capacity - used)
        before, used = rounded, used + budget
        order = []
        for segment in segments:
            if strategy == "word":
                spans = [[word] for word in segment]
            else:
                draws = [span_words(hash32(key, (3 << 16) + word[0])) for word in segment]
                spans, rest = [], segment
                while rest:
                    spans.append(rest[: draws[len(spans)]])
                    rest = rest[len(spans[-1]) :]
            for span in spans:
                # random bits between those of the sequence's number (3: four sequences) and of the position (6: 48)
                order += [(hash32(key, span[0][0]) >> 9, word[0], word) for word in span]
        for *_, word in sorted(order):
            if len(word) <= budget:
                found += word
                budget -= len(word)
    return sorted(found)


@BOTH
@pytest.mark.parametrize(("rate", "most"), [(0.15, 0), (0.3, 0), (0.6, 0), (0.3, 5)])
def test_the_chosen_positions_are_the_walks(strategy: str, rate: float, most: int) -> None:
    ids, bounds, _ = make_rows(300, 48, 4, seed=8)
    out = masked(ids, bounds, strategy, vocabulary(), rate=rate, max_predictions=most)
    for row in range(len(ids)):
        lengths, key = bounds[row, :, 0].tolist(), streams.key(11, 2, row)
        assert chosen(out, row) == expected(ids[row].tolist(), lengths, key, strategy, rate, out.labels.shape[1])


# -- statistics ---------------------------------------------------------------------------------------------------


@BOTH
def test_no_word_is_predicted_in_part(strategy: str) -> None:
    ids, bounds, _ = make_rows(1500, 128, seed=5)
    out = masked(ids, bounds, strategy, vocabulary(), rate=0.3)
    whole = 0
    for row in range(len(ids)):
        positions = set(chosen(out, row))
        for segments in segments_of(ids[row].tolist(), bounds[row, :, 0].tolist()):
            for word in (word for segment in segments for word in segment):
                inside = len(positions & set(word))
                assert inside in (0, len(word))
                whole += inside > 1
    assert whole > 5000


@BOTH
def test_words_of_a_length_are_equally_likely(strategy: str) -> None:
    """60 words of 1, 2 and 3 tokens alternately under 4,000 row ids; 5 standard deviations allowed."""
    tokens = [token for _ in range(20) for token in (10, 11, 17, 12, 18, 19)]
    out = masked(*one_sequence(tokens, 4000), strategy, vocabulary())
    hits = np.bincount(out.positions[out.labels >= 0], minlength=122)
    ends = 1 if strategy == "word" else 5  # the last span is cut, so words at the ends differ slightly
    for first in (1, 2, 4):  # of the first word of that length
        of_length = hits[first::6][:20][ends:-ends]
        mean = of_length.mean()
        assert abs(of_length - mean).max() < 5 * np.sqrt(mean), (first, of_length)
    assert out.counts.sum() / (4000 * 120) == pytest.approx(0.15, rel=0.005)


def test_spans_have_the_published_lengths() -> None:
    """Runs in long rows of one-token words at 1%, of which few are cut by the budget or touch: within 2% of 0.2 * 0.8^(k-1)
    without its tail (Joshi et al. 2020: a mean of 3.8)."""
    out = masked(*one_sequence([10] * 32_766, 60), "span", vocabulary(), rate=0.01)
    lengths = [len(run) for row in range(60) for run in list_runs(chosen(out, row))]
    shares = Counter(lengths)
    for k in range(1, 11):
        assert shares[k] / len(lengths) == pytest.approx(0.2 * 0.8 ** (k - 1) / (1 - 0.8**10), abs=0.02)
    assert np.mean(lengths) == pytest.approx(3.8, abs=0.15) and len(lengths) > 4500


def test_a_run_of_predictions_is_shown_in_one_way() -> None:
    ids, bounds, _ = make_rows(3000, 128, seed=6)
    out = masked(ids, bounds, "span", vocabulary())
    kinds: Counter[str] = Counter()
    for row in range(len(ids)):
        for run in list_runs(chosen(out, row)):
            hidden, kept = out.ids[row, run] == 4, out.ids[row, run] == ids[row, run]
            assert hidden.all() or not hidden.any()
            # a random token may be the one it replaces
            kinds["hidden" if hidden.all() else "kept" if kept.all() else "mixed" if kept.any() else "random"] += 1
    shares = {kind: count / kinds.total() for kind, count in kinds.items()}
    assert shares["hidden"] == pytest.approx(0.8, abs=0.005) and shares["kept"] == pytest.approx(0.1, abs=0.005)
    assert shares["random"] == pytest.approx(0.1, abs=0.005) and shares.get("mixed", 0.0) < 0.001


# -- words that do not fit, and other vocabularies ----------------------------------------------------------------


@BOTH
def test_words_above_the_budget_are_skipped(strategy: str) -> None:
    long, short = [10, *[17] * 29], [11, 12]
    out = masked(*one_sequence([*long, *short], 200), strategy, vocabulary())  # 32 tokens: 4 or 5 predictions
    assert all(chosen(out, row) == [31, 32] for row in range(200))
    for most in (0, 1):  # a row of one word
        out = masked(*one_sequence(long, 20), strategy, vocabulary(), max_predictions=most)
        assert not out.counts.any() and (out.labels == -100).all() and (out.ids[:, 1:31] == long).all()


@BOTH
@pytest.mark.parametrize("kind", ["unigram", "uncased", "bytes", "chinese"])
def test_words_are_those_of_the_text(strategy: str, kind: str, tmp_path: Path) -> None:
    """Between spaces, and in Chinese every character."""
    text = "she sells lazy foxes naïvely near wordy rivers by the banking quickness follow jumps surely"
    words = text.split()
    if kind == "bytes":
        tokenizer = Tokenizer.load(fast_tokenizers.write(tmp_path / "tokenizer.json"))
    elif kind == "chinese":
        (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *"中文的大小", "##文", "fox", "##es"]) + "\n")
        tokenizer, words = (
            Tokenizer.load(tmp_path / "vocab.txt"),
            ["中", "文", "foxes", *"的大小中文文大", "foxes", "的"],
        )
        text = "中文 foxes 的大小中文文大foxes的"
    else:
        tokenizer = runs.tokenizer(tmp_path, kind)
    (tokens,) = tokenizer.encode_texts([text])
    assert tokenizer.unk_id not in tokens
    last = np.cumsum([len(ids) for ids in (*tokenizer.encode_batch(words[:1]), *tokenizer.encode_words(words[1:]))])
    assert last[-1] == len(tokens) and (kind == "chinese" or last[-1] > 1.5 * len(words))
    of_word = np.repeat(np.arange(len(words)), np.diff(last, prepend=0))
    ids = np.array([[tokenizer.cls_id, *tokens, tokenizer.sep_id]] * 400, np.uint16)
    bounds = np.full((400, 1, 2), ids.shape[1], np.uint16)
    out = masked(ids, bounds, strategy, MaskingVocabulary.of(tokenizer), rate=0.3)
    seen: Counter[int] = Counter()
    for row in range(400):
        found = Counter(of_word[position - 1] for position in chosen(out, row))
        assert all(count == (of_word == word).sum() for word, count in found.items())
        seen.update(found.keys())
    assert len(seen) == len(words) and out.counts.mean() / len(tokens) == pytest.approx(0.3, rel=0.05)

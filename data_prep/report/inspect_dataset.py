"""Verification of datasets, and inspection: counts, a histogram of lengths and sample rows as text.

Verification reads shards in several processes; its report does not depend on how many. Inspection shows counts of rows, values of
the manifest, and masks of the function that the trainer calls. A row's bar has one character a token or, on a narrow screen,
every few tokens: the sequence's number in its A part, `=` in its B part, `.` in padding.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_prep.common.errors import BadInput
from megabert.data import shards
from megabert.data.masking import Masked, Masking, MaskingVocabulary, mask
from megabert.data.tokenizer import Tokenizer

# rows counted at most, spread over the dataset
HISTOGRAM_ROWS = 1 << 16
# columns
NARROWEST, WIDEST = 60, 160
LABELS = {0: "next", 1: "random next", -1: "no pair"}
# ANSI: yellow, red, green, dim
COLOURS = {"mask": "33", "random": "31", "kept": "32", "special": "2"}

# text that may hold colours, and the columns it takes
Word = tuple[str, int]


class _Screen:
    """Columns of the screen, and whether it takes colours (a terminal, and NO_COLOR is not set)."""

    def __init__(self) -> None:
        self.width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
        self.colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def paint(self, text: str, how: str) -> str:
        return f"\x1b[{COLOURS[how]}m{text}\x1b[0m" if self.colour else text

    def wrap(self, label: str, words: Iterable[str | Word]) -> list[str]:
        """`label` and `words` on lines of the screen's width, later lines indented under the first word."""
        lines, used = [label], len(label)
        for text, columns in ((word, len(word)) if isinstance(word, str) else word for word in words):
            if used > len(label) and used + 1 + columns > self.width:
                lines.append(" " * len(label))
                used = len(label)
            gap = used > len(label)
            lines[-1] += " " * gap + text
            used += columns + gap
        return lines


def datasets(folder: str | os.PathLike[str]) -> list[Path]:
    """`folder` itself where it holds a manifest or a shard, else its sub-folders that do, by name; else `folder`."""
    folder = Path(folder)
    if _is_dataset(folder):
        return [folder]
    return sorted(filter(_is_dataset, folder.glob("*"))) or [folder]


def _is_dataset(folder: Path) -> bool:
    """A shard without a manifest counts: a dataset that lost its manifest must be reported."""
    return (folder / shards.MANIFEST).exists() or any(folder.glob("*.tar"))


def verify(folder: str | os.PathLike[str], workers: int = 1, progress: bool = False) -> Iterator[str]:
    """Every problem of the datasets in `folder`, one line each, always in the same order (see `shards.plan`).

    `workers` processes read one shard each at a time. `progress` draws a bar of bytes on stderr where that is a terminal.
    """
    parts = [part for dataset in datasets(folder) for part in shards.plan(dataset)]
    checks = [part for part in parts if isinstance(part, shards.ShardCheck)]
    workers = min(workers, len(checks))
    bar = tqdm(
        total=sum(check.shard.bytes for check in checks),
        unit="B",
        unit_scale=True,
        desc="verify",
        disable=None if progress else True,
    )
    pool = None
    try:
        if workers > 1:
            context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of the parent hold
            pool = ProcessPoolExecutor(workers, context, _leave_interrupts_to_the_parent)
            results = pool.map(shards.ShardCheck.problems, checks)
        else:
            results = map(shards.ShardCheck.problems, checks)
        for part in parts:
            if isinstance(part, str):
                yield part
            else:
                yield from next(results)
                bar.update(part.shard.bytes)
    finally:
        bar.close()
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def inspect(folder: str | os.PathLike[str], rows: int = 3, seed: int = 0, masking: str = "token") -> str:
    """Counts, lengths and `rows` sample rows of every dataset in `folder`, packed, decoded and masked.

    `seed` picks the rows and seeds the mask (epoch 0); `masking` is token, word or span. ValueError (BadInput for an
    argument) names what is wrong.
    """
    if rows < 0:
        raise BadInput(f"--rows: must be at least 0, is {rows}")
    if seed < 0:
        raise BadInput(f"--seed: must be at least 0, is {seed}")
    if masking not in ("token", "word", "span"):
        raise BadInput(f"--masking: must be token, word or span, is {masking}")
    screen = _Screen()
    parts = [_dataset(path, rows, seed, Masking(masking), screen) for path in datasets(folder)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def histogram(values: np.ndarray, top: int, bar: int, bins: int = 16) -> list[str]:
    """Lines of a bar chart of `values` in 1..top, bars of at most `bar` characters."""
    edges = np.linspace(0, top, min(bins, top) + 1).astype(int)
    counts = np.histogram(values, bins=np.append(edges[:-1] + 1, top + 1))[0]
    most = max(1, int(counts.max()))
    return [
        f"{low + 1:5}-{high:<5} {count:>11,} {'█' * round(bar * count / most)}".rstrip()
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]


def _dataset(folder: Path, samples: int, seed: int, masking: Masking, screen: _Screen) -> list[str]:
    dataset = shards.Dataset(folder)
    m = dataset.manifest
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    if tokenizer.sha256 != m.tokenizer["sha256"]:
        raise ValueError(f"{tokenizer.path}: not the tokenizer that {folder} was built with (SHA-256 differs)")
    lengths = dataset.read(np.arange(0, m.rows, -(-m.rows // HISTOGRAM_ROWS))).bounds[:, :, 0].astype(np.int64)
    used = lengths > 0
    size = sum(shard.bytes for shard in m.shards) / 1e6
    facts = {
        "dataset": str(folder),
        "fingerprint": m.fingerprint,
        "rows": f"{m.rows:,} of {m.seq_len} tokens, up to {m.max_sequences} sequences each, "
        f"{len(m.shards)} shards, {size:,.1f} MB",
        "tokenizer": f"{m.tokenizer['file']} ({tokenizer.kind}), {m.vocab_size:,} tokens, "
        f"sha256 {tokenizer.sha256[:16]}…",
        "held out": f"{m.held_out['rows'] if m.held_out else 0:,} rows",
    }
    facts |= {name.replace("_", " "): _readable(value) for name, value in sorted(m.statistics.items())}
    facts["counted"] = (
        f"fill {lengths.sum() / (len(lengths) * m.seq_len):.2%}, "
        f"{used.sum(1).mean():.3f} sequences a row, over {len(lengths):,} rows"
    )
    label = max(map(len, facts)) + 2
    lines = [line for name, text in facts.items() for line in screen.wrap(f"{name:{label}}", text.split(" "))]
    lines += ["", "tokens a sequence", *histogram(lengths[used], m.seq_len, screen.width - 25)]
    chosen = np.sort(np.random.default_rng(seed).choice(m.rows, min(samples, m.rows), replace=False))
    if len(chosen):
        lines += ["", *_legend(masking, screen)]
    vocabulary = MaskingVocabulary(
        tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids.values(), tokenizer.unit_start
    )
    for row_id in chosen:
        row = dataset.read(row_id[None])
        masked = mask(row.ids, row.bounds, row_id[None], seed=seed, epoch=0, vocabulary=vocabulary, masking=masking)
        lines += ["", *_row(int(row_id), row, masked, tokenizer, screen)]
    return lines


def _readable(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _legend(masking: Masking, screen: _Screen) -> list[str]:
    parts = {
        "mask": f"[MASK] hidden ({masking.mask:.0%} of them),",
        "random": f"*word* a random token in its place ({masking.random:.0%}),",
        "kept": f"=word= kept ({1 - masking.mask - masking.random:.0%})",
    }
    title = f"predicted: {masking.rate:.0%} of the tokens, by {masking.strategy}"
    return [title, *screen.wrap("  ", [(screen.paint(text, name), len(text)) for name, text in parts.items()])]


def _row(row_id: int, rows: shards.Rows, masked: Masked, tokenizer: Tokenizer, screen: _Screen) -> list[str]:
    """The lines of one row; `rows` and `masked` hold it alone."""
    bounds = [(int(length), int(first)) for length, first in rows.bounds[0] if length]
    lines = [f"row {row_id}", "  " + _bar(bounds, rows.ids.shape[1], screen.width - 2)]
    words = _words(rows.ids[0], masked, tokenizer, screen)
    start = 0
    for slot, (length, first) in enumerate(bounds):
        ids = rows.ids[0, start : start + length]
        a = ["[CLS]", *_plain(ids[1 : first - 1], tokenizer), "[SEP]"]
        lines.append(f"  sequence {slot}: {length} tokens, {LABELS[int(rows.isnext[0, slot])]}")
        lines += screen.wrap("    A: ", a)
        if length > first:
            lines += screen.wrap("    B: ", [*_plain(ids[first : length - 1], tokenizer), "[SEP]"])
        lines += screen.wrap("    masked: ", _joined(words[start : start + length]))
        start += length
    return lines


def _bar(bounds: list[tuple[int, int]], seq_len: int, width: int) -> str:
    """How sequences of (length, length of A) fill a row of `seq_len` tokens, in at most `width` characters."""
    marks = "".join(
        str(slot % 10) * first + "=" * (length - first) for slot, (length, first) in enumerate(bounds)
    ).ljust(seq_len, ".")
    width = min(width, seq_len)
    return "".join(marks[i * seq_len // width] for i in range(width))


def _plain(ids: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    return [_printable(word) for word in tokenizer.decode(ids).split()]


def _printable(text: str) -> str:
    """`text` without characters that would control the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _words(ids: np.ndarray, masked: Masked, tokenizer: Tokenizer, screen: _Screen) -> list[tuple[bool, Word]]:
    """Each token of a row as the model sees it: whether a space stands before it, and its text with marks."""
    predicted = set(masked.positions[0, : masked.counts[0]].tolist())
    special = set(tokenizer.special_ids.values())
    result, after_special = [], True
    for at, (was, shown) in enumerate(zip(ids.tolist(), masked.ids[0].tolist(), strict=True)):
        text, how = _printable(tokenizer.tokens[shown].strip()), None
        if at in predicted:
            how = "mask" if shown == tokenizer.mask_id else "kept" if shown == was else "random"
            text = text or "\u2581"  # a token of a space alone
            text = {"mask": text, "random": f"*{text}*", "kept": f"={text}="}[how]
        elif shown in special:
            how = "special"
        space = after_special or was in special or bool(tokenizer.word_start[was])
        result.append((space, (screen.paint(text, how) if how else text, len(text))))
        after_special = was in special
    return result


def _joined(tokens: list[tuple[bool, Word]]) -> list[Word]:
    """Tokens without a space between them become one word."""
    words: list[Word] = []
    for space, (text, columns) in tokens:
        if space or not words:
            words.append((text, columns))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + columns)
    return words

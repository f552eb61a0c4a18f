"""Verification of datasets, and inspection: counts, a histogram of lengths and sample rows as text.

Verification reads shards in several processes; the report does not depend on their number. Inspection shows counts of rows, values of
the manifest, and masks by the trainer's function.
"""

from __future__ import annotations

import multiprocessing
import os
import posixpath
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from data_prep.common.errors import BadInput, WorkerDied
from data_prep.executor.pool import interrupts_blocked
from megabert.common import storage
from megabert.data import shards
from megabert.data.masking import Masked, MaskingConfig, MaskingVocabulary, mask
from megabert.data.tokenizer import Tokenizer

# most rows counted, spread over the dataset, and rows in memory at once
HISTOGRAM_ROWS, READ_ROWS = 1 << 16, 1 << 12
# lines and characters of a histogram's bars
BINS, BAR = 16, 50
LABELS = {0: "next", 1: "random next", -1: "no pair"}
# seed of the sample and its masks
SEED = 0


def datasets(folder: str | os.PathLike[str]) -> Sequence[str | Path]:
    """`folder` if it has a manifest or a shard, else its sub-folders with one, by name; URLs of a URL. Raises BadInput without any."""
    found: Sequence[str | Path]
    if storage.is_url(folder):
        folder = os.fspath(folder).rstrip("/")
        if storage.exists(storage.join(folder, shards.MANIFEST)):  # some servers have no lists
            return [folder]
        here = re.compile(rf"{re.escape(folder)}(/[^/]+)?/({re.escape(shards.MANIFEST)}|[^/]*\.tar)")
        below = storage.find(storage.join(folder, ""))
        found = sorted({posixpath.dirname(each.url) for each in below if here.fullmatch(each.url)})
        found = [folder] if folder in found else found
    else:
        folder = Path(folder)
        found = [folder] if _is_dataset(folder) else sorted(path for path in folder.glob("*") if _is_dataset(path))
    if not found:
        raise BadInput(f"{folder}: no dataset ({shards.MANIFEST}) there; `megabert prep build …` makes one")
    return found


def _is_dataset(folder: Path) -> bool:
    """Also true for a shard without a manifest, since a missing manifest has to be reported."""
    return (folder / shards.MANIFEST).exists() or any(folder.glob("*.tar"))


def verify(folder: str | os.PathLike[str], workers: int = 1, progress: bool = False) -> Iterator[str]:
    """Every problem of the datasets in `folder`, one line each, always in the same order (see `shards.plan`).

    `workers` processes read a shard each at a time. `progress` draws a bar of bytes on stderr if that is a terminal.
    """
    parts = [part for dataset in datasets(folder) for part in shards.plan(dataset)]
    checks = [part for part in parts if isinstance(part, shards.ShardCheck)]
    bar = tqdm(
        total=sum(check.shard.bytes for check in checks),
        unit="B",
        unit_scale=True,
        desc="verify",
        disable=None if progress else True,
    )
    with bar, ExitStack() as stack:
        results: Iterator[list[str]] = map(shards.ShardCheck.problems, checks)
        if min(workers, len(checks)) > 1:
            context = multiprocessing.get_context("spawn")  # a fork would copy locks held by threads of the parent
            pool = ProcessPoolExecutor(min(workers, len(checks)), context)
            stack.callback(pool.shutdown, cancel_futures=True)
            with interrupts_blocked():  # the parent handles them
                results = pool.map(shards.ShardCheck.problems, checks)
        for part in parts:
            if isinstance(part, str):
                yield part
            else:
                try:
                    yield from next(results)
                except BrokenProcessPool:
                    raise WorkerDied(
                        "a worker process died (out of memory?); try again, if need be with fewer --workers"
                    ) from None
                bar.update(part.shard.bytes)


def inspect(folder: str | os.PathLike[str], rows: int = 3, strategy: Literal["token", "word", "span"] = "token") -> str:
    """Counts, lengths and `rows` sample rows of each dataset in `folder`, masked as for training with `data.masking.strategy`.

    Raises ValueError if the manifest, the tokenizer or a row is damaged.
    """
    if rows < 0:
        raise BadInput(f"--rows: must be at least 0, is {rows}")
    return "\n\n".join("\n".join(_dataset(path, rows, MaskingConfig(strategy=strategy))) for path in datasets(folder))


def _dataset(folder: str | Path, samples: int, masking: MaskingConfig) -> list[str]:
    dataset = shards.Dataset(folder)
    m = dataset.manifest
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    if tokenizer.sha256 != m.tokenizer["sha256"]:
        raise ValueError(f"{tokenizer.path}: not the tokenizer that {folder} was built with (SHA-256 differs)")
    counted = np.arange(0, m.rows, -(-m.rows // HISTOGRAM_ROWS))
    parts = (counted[at : at + READ_ROWS] for at in range(0, len(counted), READ_ROWS))
    lengths = np.concatenate([dataset.read(rows).bounds[:, :, 0] for rows in parts]).astype(np.int64)
    used = lengths > 0
    held_out = f"{m.held_out['rows']:,} rows" if m.held_out else "0 rows"
    if m.held_out and "passages" in m.held_out:
        held_out += f" of {m.held_out['passages']:,} passages of about {m.held_out['passage_tokens']:,} tokens"
    facts = {
        "dataset": storage.public(str(folder)),
        "fingerprint": m.fingerprint,
        "rows": f"{m.rows:,} of {m.seq_len} tokens, up to {m.max_sequences} sequences each, "
        f"{len(m.shards)} shards, {sum(shard.bytes for shard in m.shards) / 1e6:,.1f} MB",
        "tokenizer": f"{m.tokenizer['file']} ({tokenizer.kind}), {m.vocab_size:,} tokens, sha256 {tokenizer.sha256[:16]}…",
        "held out": held_out,
        **{
            name.replace("_", " "): f"{value:,}" if isinstance(value, int) else str(value)
            for name, value in sorted(m.statistics.items())
        },
        "counted": f"fill {lengths.sum() / (len(lengths) * m.seq_len):.2%}, "
        f"{used.sum(1).mean():.3f} sequences a row, over {len(lengths):,} rows",
    }
    label = max(map(len, facts)) + 2
    lines = [f"{name:{label}}{text}" for name, text in facts.items()]
    lines += ["", "tokens a sequence", *histogram(lengths[used], m.seq_len)]
    shown = f"masked: {masking.rate:.0%} of the tokens, by {masking.strategy}: [MASK], *random token*, =kept="
    lines += ["", shown] if samples else []
    vocabulary = MaskingVocabulary.of(tokenizer)
    for row_id in np.sort(np.random.default_rng(SEED).choice(m.rows, min(samples, m.rows), replace=False)):
        row = dataset.read(row_id[None])
        masked = mask(row.ids, row.bounds, row_id[None], seed=SEED, epoch=0, vocabulary=vocabulary, masking=masking)
        lines += ["", f"row {row_id}", *_row(row, masked, tokenizer)]
    return lines


def histogram(values: np.ndarray, top: int) -> list[str]:
    """Lines of a bar chart of `values` in 1..top."""
    edges = np.linspace(0, top, min(BINS, top) + 1).astype(int)
    counts = np.histogram(values, bins=np.append(edges[:-1] + 1, top + 1))[0]
    most = max(1, int(counts.max()))
    return [
        f"{low + 1:5}-{high:<5} {count:>11,} {'█' * round(BAR * count / most)}".rstrip()
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]


def _row(rows: shards.Rows, masked: Masked, tokenizer: Tokenizer) -> list[str]:
    """The lines of one row, the only one in `rows` and `masked`."""
    lines: list[str] = []
    tokens = _marked(rows.ids[0], masked, tokenizer)
    start = 0
    for slot, (length, first) in enumerate(rows.bounds[0].astype(int).tolist()):
        if length:
            ids = rows.ids[0, start : start + length]
            lines.append(f"  sequence {slot}: {length} tokens, {LABELS[int(rows.isnext[0, slot])]}")
            lines += _wrapped("    A: ", f"[CLS] {_plain(ids[1 : first - 1], tokenizer)} [SEP]")
            if length > first:
                lines += _wrapped("    B: ", f"{_plain(ids[first : length - 1], tokenizer)} [SEP]")
            lines += _wrapped("    masked: ", "".join(tokens[start : start + length]).strip())
            start += length
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    width = max(shutil.get_terminal_size().columns, 40)
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=" " * len(label), break_long_words=False)


def _plain(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    return _printable(" ".join(tokenizer.decode(ids).split()))


def _printable(text: str) -> str:
    """`text` without control characters for the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _marked(ids: np.ndarray, masked: Masked, tokenizer: Tokenizer) -> list[str]:
    """Each input token of a row, with its mark and the space before it."""
    predicted = set(masked.positions[0, : masked.counts[0]].tolist())
    special = set(tokenizer.special_ids.values())
    texts, after_special = [], True
    for at, (was, shown) in enumerate(zip(ids.tolist(), masked.ids[0].tolist(), strict=True)):
        text = _printable(tokenizer.tokens[shown].strip())
        if at in predicted and shown != tokenizer.mask_id:
            text = f"={text}=" if shown == was else f"*{text}*"
        space = after_special or was in special or bool(tokenizer.word_start[was])
        texts.append(" " * space + text)
        after_special = was in special
    return texts

"""Feature extraction: vectors of texts from a model, in the order of the texts.

Devlin et al. 2019, section 5.3. The vectors do not depend on the batches, and the input may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from megabert import hf
from megabert.common import tables
from megabert.common.files import large_atomic_file
from megabert.common.logs import log
from megabert.common.streaming import in_order
from megabert.engine import DTYPES
from megabert.hf import Pretrained, tokenizer_export
from megabert.hf.inference import on_every_core, one_row, pack_weights, read_layers, vector_width
from megabert.hf.packing import groups, pack, pack_line
from megabert.hf.unknown_tokens import UnknownTokens

# batches that are sorted by length together, and whose vectors are in memory together
SORTED = 8
BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
# texts in a call of the tokenizer, and calls ahead of the model
TOKENIZED, AHEAD = 256, 8


def read_texts(path: Path, column: str = "") -> Iterator[str]:
    """The texts of a file: its lines, or a column of a table. Raises ValueError naming the line of an empty text, and as `tables`."""
    if column:
        texts = ((f"{where}, column {column!r}", value) for where, (value,) in tables.rows(path, [column]))
    else:
        texts = ((f"{path}, line {number}", line) for number, line in tables.lines(path))
    for where, value in texts:
        yield tables.read_text(value, where)


@dataclass
class SortingWindow:
    """Texts in order, whose vectors are computed in batches of similar length."""

    # int32 ids of each text, including [CLS] and [SEP]
    texts: list[np.ndarray]
    # indices into `texts`
    batches: list[list[int]]
    # fp32 [n, D] if pooled, else [N, D], the tokens of all texts concatenated
    vectors: np.ndarray


class Extractor:
    """Vectors of texts by a model. Raises ValueError for layers or a length that the model lacks."""

    def __init__(
        self,
        pretrained: Pretrained,
        layers: str = "last",
        pool: str = "mean",
        max_length: int = 0,
        batch_tokens: int | None = None,
        precision: str = "fp32",
    ) -> None:
        """`pool`: none, cls, mean or max. `batch_tokens`: tokens of a batch, on the CPU for each core (None: by device)."""
        model = pretrained.config.model
        self.layers, self.width = layers, vector_width(layers, model)
        self.max_length = max_length or model.max_positions
        if not 5 <= self.max_length <= model.max_positions:
            raise ValueError(f"--max-length {max_length}: the model takes 5 to {model.max_positions} tokens")
        self.tokenizer, self.pool = pretrained.tokenizer, pool
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = pretrained.model(self.device, DTYPES[precision])
        pack_weights(self.model)
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self.device.type]
        self.line = one_row(self.model)
        # with a causal model the vector of a text is that of its last token
        self.causal = pretrained.config.data.masking.causal
        # of the texts so far
        self.texts, self.truncated, self.unknown = 0, 0, UnknownTokens(self.tokenizer)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """fp32 [n, D]: one vector a text, in order; needs a `pool`. [0, D] without texts."""
        assert self.pool != "none"
        parts = [window.vectors for window in self.windows(texts)]
        return np.concatenate([np.empty((0, self.width), np.float32), *parts])

    def windows(self, texts: Iterable[str]) -> Generator[SortingWindow, None, None]:
        """Vectors of texts in order, some batches at a time."""

        def jobs() -> Iterator[tuple[SortingWindow, list[int]]]:
            for tokenized in self._windows_of_ids(iter(texts)):
                lengths = [len(ids) for ids in tokenized]
                vectors = np.empty((sum(lengths) if self.pool == "none" else len(lengths), self.width), np.float32)
                window = SortingWindow(tokenized, groups(lengths, self.batch_tokens), vectors)
                yield from ((window, batch) for batch in window.batches)

        with closing(on_every_core(self._compute, jobs(), self.device)) as computed:
            for window, batch in computed:
                if batch is window.batches[-1]:
                    yield window

    def _windows_of_ids(self, texts: Iterator[str]) -> Iterator[list[np.ndarray]]:
        """Windows of SORTED batches, tokenised ahead of the model."""
        calls = iter(lambda: list(islice(texts, TOKENIZED)), [])
        waiting, tokens = list[np.ndarray](), 0
        for ids in chain.from_iterable(in_order(self._tokenize, calls, 1, AHEAD)):
            waiting.append(ids)
            tokens += len(ids)
            if tokens >= SORTED * self.batch_tokens:
                yield waiting
                waiting, tokens = [], 0
        if waiting:
            yield waiting

    def _tokenize(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`[CLS] text [SEP]` of each text, cut to `max_length`."""
        tokenizer, room = self.tokenizer, self.max_length - 2
        encoded = tokenizer_export.encode(tokenizer, texts)
        self.texts += len(texts)
        self.truncated += sum(len(ids) > room for ids in encoded)
        rows = [np.array([tokenizer.cls_id, *ids[:room], tokenizer.sep_id], np.int32) for ids in encoded]
        self.unknown.add(rows)
        return rows

    def _compute(self, job: tuple[SortingWindow, list[int]]) -> tuple[SortingWindow, list[int]]:
        """Fill in the vectors of a batch."""
        window, rows = job
        vectors = self._vectors([window.texts[i] for i in rows])
        if self.pool == "none":
            ends = np.cumsum([len(ids) for ids in window.texts])
            rows = [row for i in rows for row in range(ends[i] - len(window.texts[i]), ends[i])]
        window.vectors[rows] = vectors
        return job

    @torch.no_grad()
    def _vectors(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """fp32 [n, D] if pooled, else [N, D], the tokens of all texts concatenated."""
        lengths = np.array([len(ids) for ids in texts])
        packed = (pack_line if self.line else pack)(texts, lengths.tolist(), causal=self.causal).to(self.device)
        inputs = packed.inputs() | {"seed": torch.zeros(1, dtype=torch.int64, device=self.device)}
        if self.pool == "cls":
            at = torch.from_numpy(packed.starts + (lengths - 1 if self.causal else 0)).to(self.device)
            return read_layers(self.model, self.layers, at, **inputs).float().cpu().numpy()
        hidden = read_layers(self.model, self.layers, **inputs).float()
        if not self.line:
            spans = [np.arange(start, start + n) for start, n in zip(packed.starts, lengths, strict=True)]
            hidden = hidden[torch.from_numpy(np.concatenate(spans)).to(self.device)]  # (N, D)
        if self.pool == "none":
            return hidden.cpu().numpy()
        counts = torch.from_numpy(lengths).to(self.device)
        return torch.segment_reduce(hidden, self.pool, lengths=counts, axis=0).cpu().numpy()


def _write_npy(file: IO[bytes], windows: Iterator[SortingWindow], texts: int, extractor: Extractor) -> None:
    """One fp32 array [n, D]."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (texts, extractor.width)}
    np.lib.format.write_array_header_1_0(file, header)
    for window in windows:
        file.write(window.vectors.data)


def _write_parquet(file: IO[bytes], windows: Iterator[SortingWindow], texts: int, extractor: Extractor) -> None:
    """A row a text, a row group a window: `vector`, or lists `ids`, `tokens`, `vectors`."""
    pooled, vocabulary = extractor.pool != "none", extractor.tokenizer.tokens
    vector = pa.list_(pa.float32(), extractor.width)
    fields: dict[str, pa.DataType] = {"vector": vector}
    if not pooled:
        fields = {"ids": pa.list_(pa.int32()), "tokens": pa.list_(pa.string()), "vectors": pa.list_(vector)}
    # without trying a dictionary, which vectors do not suit
    with pq.ParquetWriter(file, pa.schema(list(fields.items())), use_dictionary=False) as table:
        for window in windows:
            columns = [pa.FixedSizeListArray.from_arrays(pa.array(window.vectors.ravel()), extractor.width)]
            if not pooled:
                ids = np.concatenate(window.texts)
                tokens = pa.array([vocabulary[i] for i in ids.tolist()], pa.string())
                offsets = pa.array(np.cumsum([0, *map(len, window.texts)], dtype=np.int32))
                columns = [pa.ListArray.from_arrays(offsets, values) for values in (pa.array(ids), tokens, *columns)]
            table.write_table(pa.table(columns, schema=table.schema))


def extract(model: str | Path, input: str, output: str, text: str, tokenizer: str, **options: Any) -> None:
    """Write the vectors of the texts in `input`, of its column `text` if it is a table; `options` are Extractor's. `output` appears when it
    is complete. Raises ValueError or OSError naming the mistake, if possible before computing anything."""
    path, target = Path(input), Path(output)
    total = sum(1 for _ in read_texts(path, text))
    if not total:
        raise ValueError(f"{path}: has no text in it")
    extractor = Extractor(hf.load(model, tokenizer), **options)
    write = _write_npy if target.suffix == ".npy" else _write_parquet
    texts = tqdm(read_texts(path, text), total=total, unit=" texts", disable=None, leave=False)
    with large_atomic_file(target) as file, closing(texts), closing(extractor.windows(texts)) as windows:
        write(file, windows, total, extractor)
        if extractor.texts != total:
            raise ValueError(
                f"{path}: had {total:,} texts and now has {extractor.texts:,}; it must not change meanwhile"
            )
    log.info(f"{target}: vectors of {total:,} texts")
    if extractor.truncated:
        log.warning(f"{extractor.truncated:,} of them are longer than {extractor.max_length} tokens and lost their end")
    extractor.unknown.warn(path)

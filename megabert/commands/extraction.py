"""Feature extraction: texts of a file in, a model's vectors of them out, in the order of the texts.

Devlin et al. 2019, section 5.3. The vectors are the same whatever the batches, an input may be larger than memory, and a
call that was killed resumes and writes the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from megabert import hf
from megabert.common import tables
from megabert.common.files import appearing_file, sha256_of
from megabert.common.logs import log
from megabert.common.streaming import Spool, in_order
from megabert.data.packing import groups, pack, pack_line
from megabert.hf import Pretrained, sentence_folder
from megabert.hf.inference import one_thread, pack_weights, threads_apart, workers

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# batches of tokens that are sorted by length together, and whose vectors are in memory together
SORTED = 8
BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
# texts in one call of the tokenizer, and calls that are ahead of the model
TOKENIZED, AHEAD = 256, 8

Text = tuple[str, str | None]


def read_texts(path: Path, columns: Sequence[str] = ()) -> Iterator[Text]:
    """The texts of a file: its lines, or one or two named columns of a .tsv, .csv or .jsonl, also .gz.

    Raises ValueError naming file and line for an empty text, a missing column, and what `tables` refuses.
    """
    is_table = tables.ending(path) in tables.ENDINGS
    if is_table and not columns:
        raise ValueError(f"{path}: is a table; name the column of the text with --text")
    if columns and not is_table:
        raise ValueError(f"{path}: columns are of files that end in .tsv, .csv or .jsonl (or those and .gz)")
    if not columns:
        for number, line in tables.lines(path):
            yield tables.text_of(line, f"{path}, line {number}"), None
        return
    for where, values in tables.rows(path, columns):
        texts = [
            tables.text_of(value, f"{where}, column {name!r}") for name, value in zip(columns, values, strict=True)
        ]
        yield texts[0], (texts[1] if len(texts) > 1 else None)


class Layers(NamedTuple):
    """Hidden states (0 = embeddings, L = the last layer) that are summed, or concatenated.

    They are `BertForPreTraining.hidden_states`': in a pre-LN model, only the last one is normalised.
    """

    indices: tuple[int, ...]
    summed: bool = False

    @staticmethod
    def parse(text: str, count: int) -> Layers:
        """The layers that --layers names, of a model of `count`. Raises ValueError naming what the model lacks."""
        every = tuple(range(1, count + 1))
        named = {
            "last": Layers((count,)),
            "second-to-last": Layers((count - 1,)),
            "sum-last-4": Layers(every[-4:], summed=True),
            "concat-last-4": Layers(every[-4:]),
            "sum-all": Layers(every, summed=True),
            "embeddings": Layers((0,)),
        }
        if text in named:
            if text.endswith("-4") and count < 4:
                raise ValueError(f"--layers {text}: the model has {count} layers")
            return named[text]
        try:
            indices = tuple(int(number) for number in text.split(","))
        except ValueError:
            raise ValueError(f"--layers {text}: is none of {', '.join(named)}, N[,N…]") from None
        if not 0 <= min(indices) <= max(indices) <= count:
            raise ValueError(f"--layers {text}: the model has 0 (embeddings) to {count}")
        return Layers(indices)

    def of(self, states: Sequence[Tensor]) -> Tensor:
        """[B, T, D] each -> [B, T, D], or [B, T, k * D] concatenated."""
        chosen = [states[i] for i in self.indices]
        return torch.stack(chosen).sum(0) if self.summed else torch.cat(chosen, -1)


class TokenizedText(NamedTuple):
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`; segment 1 begins at `second`."""

    ids: np.ndarray
    second: int
    truncated: bool


class Vectors(NamedTuple):
    """Vectors of n consecutive texts of N tokens in all."""

    # [n, D] where pooled, else [N, D]
    vectors: np.ndarray
    # int32 [N]
    ids: np.ndarray
    # int64 [n], tokens of each text
    lengths: np.ndarray
    # bool [n]
    truncated: np.ndarray


@dataclass
class SortingWindow:
    """Texts that are computed in batches of similar length; `batches_left` are not computed yet."""

    texts: list[TokenizedText]
    # [n, D] where pooled, else [N, D]
    vectors: np.ndarray
    # int64 [n], where the tokens of each text end
    ends: np.ndarray
    batches_left: int = field(default=0)

    def finished(self) -> Vectors:
        ids = np.concatenate([text.ids for text in self.texts])
        truncated = np.array([text.truncated for text in self.texts])
        return Vectors(self.vectors, ids, np.diff(self.ends, prepend=0), truncated)


class Extractor:
    """A model as a function from texts to vectors. Raises ValueError for layers or a length that the model lacks."""

    def __init__(
        self,
        pretrained: Pretrained,
        layers: str = "last",
        pool: str = "mean",
        max_length: int = 0,
        batch_tokens: int | None = None,
        dtype: str = "float32",
        precision: str = "fp32",
        normalise: bool = False,
    ) -> None:
        """`pool`: none, cls, mean or max. `batch_tokens` are computed at once, on the CPU by one core (None: as many as
        suit the device). `normalise`: pooled vectors have length 1."""
        model = pretrained.config.model
        self.layers = Layers.parse(layers, model.layers)
        self.max_length = max_length or model.max_positions
        if not 5 <= self.max_length <= model.max_positions:
            raise ValueError(f"--max-length {max_length}: the model takes 5 to {model.max_positions} tokens")
        if batch_tokens is not None and batch_tokens < 1:
            raise ValueError(f"--batch-tokens {batch_tokens}: must be 1 or more")
        assert not (normalise and pool == "none")
        self.pretrained, self.pool, self.dtype, self.normalise = pretrained, pool, dtype, normalise
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = pretrained.model(self.device, PRECISIONS[precision])
        pack_weights(self.model)
        self.workers = workers(self.device)
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self.device.type]
        self.line = self.device.type == "cpu" and self.model.backends.attention.name == "native"
        # a causal model's vector of a text is that of its last token
        self.causal = pretrained.config.data.masking.causal
        self.width = model.hidden * (1 if self.layers.summed else len(self.layers.indices))
        self.only_last_layer = self.layers == Layers((model.layers,))

    def tokenize(self, texts: Sequence[Text]) -> list[TokenizedText]:
        """The token ids of texts or pairs, cut to `max_length`: the end of the longer one first, as BERT does."""
        tokenizer = self.pretrained.tokenizer
        first = tokenizer.encode_texts([a for a, _ in texts])
        second = tokenizer.encode_texts([b or "" for _, b in texts])
        tokenized = []
        for (_, pair), a, b in zip(texts, first, second, strict=True):
            room = self.max_length - (2 if pair is None else 3)
            truncated = len(a) + len(b) > room
            if truncated:
                kept = min(len(b), max(room // 2, room - len(a)))
                a, b = a[: room - kept], b[:kept]
            ids = [tokenizer.cls_id, *a, tokenizer.sep_id]
            more = [*b, tokenizer.sep_id] if pair is not None else []
            tokenized.append(TokenizedText(np.array(ids + more, np.int32), len(ids), truncated))
        return tokenized

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """[n, D]: one vector a text, in their order. For a `pool`; of no text [0, D]."""
        assert self.pool != "none"
        parts = [part.vectors for part in self.parts((text, None) for text in texts)]
        return np.concatenate([np.empty((0, self.width), self.dtype), *parts])

    def parts(self, texts: Iterable[Text]) -> Generator[Vectors, None, None]:
        """Vectors of texts or pairs, in their order, some batches' worth at a time.

        Where a part ends depends on the texts since the part before alone, and what is in it on no other part. Raises
        ValueError when a vector is too large for float16.
        """

        def jobs() -> Iterator[tuple[SortingWindow, list[int]]]:
            for tokenized in self._sorting_windows(iter(texts)):
                window, batches = self._window(tokenized)
                yield from ((window, batch) for batch in batches)

        computed = in_order(self._compute, jobs(), self.workers, 2 * self.workers, one_thread)
        with threads_apart(), closing(computed):
            for window in computed:
                window.batches_left -= 1
                if not window.batches_left:
                    yield window.finished()

    def _sorting_windows(self, texts: Iterator[Text]) -> Iterator[list[TokenizedText]]:
        """Texts of SORTED batches, tokenised ahead of the model."""
        calls = iter(lambda: list(islice(texts, TOKENIZED)), [])
        waiting: list[TokenizedText] = []
        tokens = 0
        for tokenized in in_order(self.tokenize, calls, 1, AHEAD):
            for text in tokenized:
                waiting.append(text)
                tokens += len(text.ids)
                if tokens >= SORTED * self.batch_tokens:
                    yield waiting
                    waiting, tokens = [], 0
        if waiting:
            yield waiting

    def _window(self, texts: list[TokenizedText]) -> tuple[SortingWindow, list[list[int]]]:
        """A window without its vectors, and the indices of the texts of each batch."""
        lengths = [len(text.ids) for text in texts]
        batches = groups(lengths, self.batch_tokens)
        rows = sum(lengths) if self.pool == "none" else len(texts)
        vectors = np.empty((rows, self.width), self.dtype)
        return SortingWindow(texts, vectors, np.cumsum(lengths, dtype=np.int64), len(batches)), batches

    def _compute(self, job: tuple[SortingWindow, list[int]]) -> SortingWindow:
        """Fills in the vectors of a batch."""
        window, batch = job
        texts = [window.texts[i] for i in batch]
        # an overflow is an error below
        with np.errstate(over="ignore"):
            vectors = self._vectors(texts).astype(self.dtype, copy=False)
        if not np.isfinite(vectors).all():
            raise ValueError(f"a vector is not finite in {self.dtype}; take float32, or another model")
        if self.pool != "none":
            window.vectors[batch] = vectors
            return window
        start = 0
        for i, text in zip(batch, texts, strict=True):
            end = window.ends[i]
            window.vectors[end - len(text.ids) : end] = vectors[start : start + len(text.ids)]
            start += len(text.ids)
        return window

    @torch.no_grad()
    def _vectors(self, texts: Sequence[TokenizedText]) -> np.ndarray:
        """fp32 [n, D] where pooled, else [N, D], the tokens of the texts behind each other."""
        sequences, seconds = [text.ids for text in texts], [text.second for text in texts]
        place = pack_line if self.line else pack
        packed = place(sequences, seconds, causal=self.causal).to(self.device)
        inputs = packed.inputs() | {"seed": torch.zeros(1, dtype=torch.int64, device=self.device)}
        lengths = np.array([len(ids) for ids in sequences])
        if self.pool == "cls":
            at = torch.from_numpy(packed.starts + (lengths - 1 if self.causal else 0)).to(self.device)
            if self.only_last_layer:
                return self._pooled(self.model.encode(**inputs, keep=at).float())
            return self._pooled(self._hidden(inputs)[at].float())
        hidden = self._hidden(inputs).float()
        if not self.line:
            spans = [np.arange(start, start + n) for start, n in zip(packed.starts, lengths, strict=True)]
            hidden = hidden[torch.from_numpy(np.concatenate(spans)).to(self.device)]  # (N, D)
        if self.pool == "none":
            return hidden.cpu().numpy()
        counts = torch.from_numpy(lengths).to(self.device)
        return self._pooled(torch.segment_reduce(hidden, self.pool, lengths=counts, axis=0))

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """(B * T, D) of the layers that are wanted."""
        states = self.model.hidden_states(**inputs, count=1 + max(self.layers.indices))
        return self.layers.of(states).flatten(0, 1)

    def _pooled(self, vectors: Tensor) -> np.ndarray:
        """[n, D]"""
        return (F.normalize(vectors, dim=-1) if self.normalise else vectors).cpu().numpy()


def encode(pretrained: Pretrained, texts: Sequence[str], pool: str = "mean", **options: Any) -> np.ndarray:
    """fp32 [n, D]: one vector a text, in their order. `options` are Extractor's, and errors."""
    return Extractor(pretrained, pool=pool, **options).encode(texts)


@dataclass(frozen=True)
class VectorFormat:
    """What all parts of a file of vectors share."""

    width: int
    # "float32" or "float16"
    dtype: str
    pooled: bool
    # the tokenizer's tokens, by id
    vocabulary: list[str]
    # what the vectors are, for the reader
    about: Mapping[str, Any]


class VectorWriter:
    """Parts of vectors in the files of a spool, a file a field, until all are there."""

    FIELDS = ("vectors", "ids", "lengths", "truncated", "texts")

    def __init__(self, spool: Spool, form: VectorFormat) -> None:
        self.spool, self.form = spool, form
        self.texts = int(spool.state.get("texts", 0))
        self.truncated = int(spool.state.get("truncated", 0))
        dtypes = (form.dtype, "int32", "int64", "bool", "int64")
        self.dtypes = {name: np.dtype(dtype) for name, dtype in zip(self.FIELDS, dtypes, strict=True)}

    def add(self, part: Vectors) -> None:
        arrays = part._asdict() | {"texts": np.array([len(part.lengths)])}
        for name, file in self.spool.files.items():
            file.write(np.ascontiguousarray(arrays[name], self.dtypes[name]).data)
        self.texts += len(part.lengths)
        self.truncated += int(part.truncated.sum())
        self.spool.advance({"texts": self.texts, "truncated": self.truncated})

    def parts(self) -> Iterator[Vectors]:
        """The parts as they were added."""
        for file in self.spool.files.values():
            file.seek(0)
        while (count := self._read("texts", 1)).size:
            texts = int(count[0])
            lengths = self._read("lengths", texts)
            tokens = int(lengths.sum())
            vectors = self._read("vectors", (texts if self.form.pooled else tokens) * self.form.width)
            yield Vectors(vectors, self._read("ids", tokens), lengths, self._read("truncated", texts))

    def _read(self, name: str, count: int) -> np.ndarray:
        return np.frombuffer(self.spool.files[name].read(count * self.dtypes[name].itemsize), self.dtypes[name])


def _write_npy(file: IO[bytes], writer: VectorWriter) -> None:
    """One array [n, D]."""
    form = writer.form
    header = {"descr": np.dtype(form.dtype).str, "fortran_order": False, "shape": (writer.texts, form.width)}
    np.lib.format.write_array_header_1_0(file, header)
    vectors = writer.spool.files["vectors"]
    vectors.seek(0)
    shutil.copyfileobj(vectors, file, 1 << 20)


def _write_parquet(file: IO[bytes], writer: VectorWriter) -> None:
    """A row a text, a row group a part: `vector`, or lists `ids`, `tokens`, `vectors`; then `truncated`."""
    form = writer.form
    vector = pa.list_(pa.float32() if form.dtype == "float32" else pa.float16(), form.width)
    fields: dict[str, pa.DataType] = {"vector": vector}
    if not form.pooled:
        fields = {"ids": pa.list_(pa.int32()), "tokens": pa.list_(pa.string()), "vectors": pa.list_(vector)}
    schema = pa.schema([*fields.items(), ("truncated", pa.bool_())], {"about": json.dumps(form.about)})
    # a dictionary of vectors would only be tried and given up
    with pq.ParquetWriter(file, schema, use_dictionary=False) as table:
        for part in writer.parts():
            columns = [pa.FixedSizeListArray.from_arrays(pa.array(part.vectors), form.width)]
            if not form.pooled:
                tokens = pa.array([form.vocabulary[i] for i in part.ids.tolist()], pa.string())
                offsets = pa.array(np.append(0, part.lengths.cumsum()).astype(np.int32))
                columns = [pa.ListArray.from_arrays(offsets, v) for v in (pa.array(part.ids), tokens, *columns)]
            table.write_table(pa.table([*columns, pa.array(part.truncated)], schema=schema))


WRITERS: dict[str, Callable[[IO[bytes], VectorWriter], None]] = {".parquet": _write_parquet, ".npy": _write_npy}


@contextmanager
def writing(path: Path, form: VectorFormat, facts: Mapping[str, Any]) -> Iterator[VectorWriter]:
    """A writer of parts, whose file is `path` when the block ends without an error.

    After a kill it resumes, if `facts` (all that decides the vectors) are the same. Raises as `Spool`, and OSError.
    """
    decides = {"about": form.about, "width": form.width, "dtype": form.dtype, "pooled": form.pooled, **facts}
    with Spool(path, decides, VectorWriter.FIELDS) as spool:
        writer = VectorWriter(spool, form)
        yield writer
        spool.commit()
        with appearing_file(path) as file:
            WRITERS[path.suffix](file, writer)
        spool.finish()


@dataclass(frozen=True)
class ExtractionResult:
    texts: int
    truncated: int
    max_length: int


def extract(
    source: str, input: str, output: str, columns: Sequence[str] = (), tokenizer: str = "", **options: Any
) -> ExtractionResult:
    """Write the vectors of the texts in `input`; `options` are Extractor's, and pool "sentence".

    Raises ValueError or OSError naming the mistake, before anything is computed where it can be known; `output` is there
    only when all is written. The same call resumes one that was killed.
    """
    path, target = Path(input), Path(output)
    _check_output(target, options.get("pool", "mean"))
    total = sum(1 for _ in read_texts(path, columns))
    if not total:
        raise ValueError(f"{path}: has no text in it")
    if options.get("pool") == "sentence":
        options |= sentence_options(source, options)
    extractor = Extractor(hf.load(source, tokenizer), **options)
    pretrained = extractor.pretrained
    about = {
        "model": str(source),
        "step": pretrained.step,
        "tokenizer_sha256": pretrained.tokenizer.sha256,
        "layers": options.get("layers", "last"),
        "pool": extractor.pool,
    }
    pooled = extractor.pool != "none"
    form = VectorFormat(extractor.width, extractor.dtype, pooled, pretrained.tokenizer.tokens, about)
    facts = {
        "weights": hf.fingerprint(pretrained.weights),
        "input": sha256_of(path),
        "columns": list(columns),
        "options": options | {"max_length": extractor.max_length, "batch_tokens": extractor.batch_tokens},
    }
    with (
        writing(target, form, facts) as writer,
        tqdm(total=total, initial=writer.texts, unit=" texts", disable=None, leave=False) as bar,
    ):
        if writer.texts:
            log.info(f"{output}: resumes after {writer.texts:,} of {total:,} texts")
        rest = islice(read_texts(path, columns), writer.texts, None)
        with closing(extractor.parts(rest)) as parts:
            for part in parts:
                writer.add(part)
                bar.update(len(part.lengths))
    return ExtractionResult(total, writer.truncated, extractor.max_length)


def _check_output(path: Path, pool: str) -> None:
    if path.suffix not in WRITERS:
        raise ValueError(f"{path}: must end in {', '.join(WRITERS)}")
    if path.suffix == ".npy" and pool == "none":
        raise ValueError(f"{path}: .npy holds one vector a text; for --pool none write .parquet")
    if os.path.lexists(path):
        raise ValueError(f"{path}: is there already; name another file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder")


def sentence_options(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Extractor's options for the vectors of texts that a sentence-transformers folder describes. Raises ValueError where
    `source` is none, or `options` ask for other layers."""
    if not sentence_folder.is_sentence_folder(source):
        raise ValueError(
            f"{source}: has no {sentence_folder.MODULES}, so it does not say how texts are pooled; name a folder that "
            "`megabert export --sentence-transformers` or sentence-transformers wrote, or --pool mean"
        )
    if options.get("layers", "last") != "last":
        raise ValueError("--pool sentence: is of the last layer; leave --layers out, or pool by cls, mean or max")
    pooling = sentence_folder.read(source)
    length = options.get("max_length") or pooling.max_length
    return {"pool": pooling.pool, "normalise": pooling.normalise, "max_length": length}

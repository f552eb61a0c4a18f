"""Tokenizers, SentencePiece and WordPiece: known by the SHA-256 of their file; text yields no special id but [UNK].

The file is hashed before it is parsed, and what is parsed is what was hashed. Its content says which kind it is:

    sentencepiece  a SentencePiece model with [PAD], [UNK], [CLS], [SEP] and [MASK] at ids 0 to 4, all but [UNK] control
                   symbols
    wordpiece      BERT's published `vocab.txt`: UTF-8, one piece a line, [PAD] first, the other special pieces anywhere.
                   A vocab.txt does not say what is done to text before: a tokenizer_config.json beside it does, as in
                   Hugging Face's folders, or whoever loads it. Without either it is guessed: cased where lower-casing
                   would change some piece outside square brackets; otherwise text is lower-cased and loses its accents
                   (Devlin et al. 2019's two releases). Where that is not the guess the SHA-256 is of both files' content

A document that spells "[MASK]" is text like any other: `[`, `mask`, `]`. (transformers' BertTokenizer gives the
special id there; everywhere else its ids are the same.)
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from megabert.common.canonical_json import canonical
from megabert.common.plain_text import plain
from megabert.common.scripts import begins_unit
from megabert.data.casing import CONFIG, FIELDS, NOTHING_SAID, Casing, read_casing
from megabert.data.offsets import places_in, without_blanks

SPECIAL_IDS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}  # of a SentencePiece model
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORD_START = "\u2581"  # SentencePiece's mark of a space before the piece
CONTINUATION = "##"  # WordPiece's mark of a piece inside a word
KEPT_BLANKS = ("\n", "\t")  # symbols of a SentencePiece model that keeps whitespace; spaces are its own
USER_DEFINED = 4  # SentencePiece's number of a symbol
MAX_BYTES = 256 << 20  # a model of a million pieces takes about 20 MB
MAX_WORD = 100  # characters; BERT makes a longer word [UNK]
CHUNK = 4096  # texts handed to a thread at once


class Tokenizer:
    """What both kinds share; `load` makes one. Every array has one entry a piece.

    `pieces` are as they stand in a text, those that start a word with a space before; `word_start` is bool
    [vocab_size], false for special pieces; so is `unit_start`, the pieces that begin what word and span masking take as one
    word: in scripts without spaces between words (Chinese, Japanese, Thai, …) a piece is one. `word_local`: for any words without whitespace in them, encoding
    `" ".join(words)` equals encoding them one by one. `processor` is the library's own object, `data` the tokenizer
    file, whose usual name is `file_name`.
    """

    kind: str
    file_name: str
    keeps_whitespace = False  # whether runs of spaces, tabs and line feeds decode to what they were
    processor: Any
    proto: Any  # the protocol buffer of a SentencePiece model
    data: bytes

    def __init__(
        self, path: Path, sha256: str, pieces: Sequence[str], special_ids: dict[str, int], word_start: np.ndarray
    ) -> None:
        self.path, self.sha256 = path, sha256
        self.vocab_size = len(pieces)
        self.special_ids = dict(special_ids)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (special_ids[name] for name in SPECIAL_IDS)
        self.word_start = word_start
        self.word_start[list(special_ids.values())] = False
        self.unit_start = word_start | np.array([begins_unit(piece) for piece in pieces], bool)
        self.unit_start[list(special_ids.values())] = False
        self.pieces = [f" {p}" if starts else p for p, starts in zip(pieces, word_start.tolist(), strict=True)]
        self.word_local = True

    @staticmethod
    def load(
        path: str | os.PathLike[str], lowercase: bool | None = None, strip_accents: bool | None = None
    ) -> Tokenizer:
        """Read, hash, parse and check a tokenizer file. ValueError names the file and what is wrong with it.

        `lowercase` and `strip_accents` of a vocab.txt go before what a tokenizer_config.json beside it says.
        """
        path = Path(path)
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path}: tokenizer file not found") from None
        except IsADirectoryError:
            raise ValueError(f"{path}: is a folder; name the tokenizer file in it") from None
        if not 0 < len(data) <= MAX_BYTES:
            raise ValueError(f"{path}: is empty or larger than {MAX_BYTES >> 20} MiB, so no tokenizer")
        said = {"lowercase": lowercase, "strip_accents": strip_accents}
        beside = path.with_name(CONFIG)
        if _first_byte_that_is_no_text(data) is None and beside.is_file():
            said = read_casing(beside) | {name: value for name, value in said.items() if value is not None}
        return Tokenizer.parse(data, path, said)

    @staticmethod
    def parse(data: bytes, path: Path, said: Mapping[str, bool | None] = NOTHING_SAID) -> Tokenizer:
        """The tokenizer whose file holds `data`; errors as of `load`, `path` is what they name.

        `said`: fields of `Casing` that are known, for a vocab.txt.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        not_text = _first_byte_that_is_no_text(data)
        made: Tokenizer
        if not_text is None:
            made = _WordPiece(path, sha256, data.decode(), said)
        else:
            made = _SentencePiece(path, sha256, data, not_text)
        made.data = data
        return made

    def files(self) -> dict[str, bytes]:
        """The files that `load` makes this tokenizer of, by name; the first is the one to load."""
        return {self.file_name: self.data}

    def doubt(self) -> str:
        """Why what is done to text before may not be what the pieces were made for; "" where there is no doubt."""
        return ""

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Token ids of each text, without special tokens, on `threads` threads; -1 takes every core."""
        raise NotImplementedError

    def plain(self, text: str) -> str:
        """`text` as data_prep has it before it encodes its words: without invisible characters and HTML entities."""
        return plain(text)

    def encode_chunks(self, chunks: Sequence[str]) -> list[list[int]]:
        """Token ids of parts of a text whose whitespace is kept, each as it stands there, without a space put before it."""
        raise NotImplementedError

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts from anywhere, which a dataset would hold had it been built of them."""
        return self.encode_batch([self.plain(text) for text in texts])

    def encode_inside(self, words: Sequence[str]) -> list[list[int]]:
        """As `encode_texts`, of each word as it stands in a text without spaces, after another: without the space before it."""
        return self.encode_texts(words)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Ids of each text, those of `encode_texts`, and int64 [n, 2]: first character of each token, and one past its last.

        Characters are those of the text as given, whatever was normalised, and leave out blanks before the token. A token
        that is but a blank, or one of several that a character became, may have none: its two offsets are equal.
        """
        as_encoded = [self.plain(text) for text in texts]
        encoded = self._encode_with_offsets(as_encoded)
        return [
            (ids, places_in(text, seen, without_blanks(seen, np.array(offsets, np.int64).reshape(-1, 2))))
            for text, seen, (ids, offsets) in zip(texts, as_encoded, encoded, strict=True)
        ]

    def _encode_with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of token ids; [PAD], [CLS], [SEP] and [MASK] vanish. ValueError for an id outside the vocabulary."""
        listed = [int(i) for i in ids]
        if listed and not (min(listed) >= 0 and max(listed) < self.vocab_size):
            raise ValueError(f"{self.path}: ids to decode must lie in 0..{self.vocab_size - 1}")
        return self._decode(listed)

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError


def _in_brackets(piece: str) -> bool:
    return piece[:1] == "[" and piece[-1:] == "]"


def _first_byte_that_is_no_text(data: bytes) -> int | None:
    """Offset of the first byte that no vocab.txt holds: a control character or invalid UTF-8. None: all is text.

    Every SentencePiece model has some: its scores are tagged with 0x15.
    """
    control = re.search(rb"[^\t\n\r\x20-\x7e\x80-\xff]", data)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return min(error.start, control.start()) if control else error.start
    return control.start() if control else None


class _SentencePiece(Tokenizer):
    """A SentencePiece model from its bytes; `not_text` is the byte that shows it to be no vocab.txt."""

    kind, file_name = "sentencepiece", "tokenizer.model"

    @functools.cached_property
    def proto(self) -> Any:
        from sentencepiece import sentencepiece_model_pb2

        messages: Any = sentencepiece_model_pb2
        return messages.ModelProto.FromString(self.processor.serialized_model_proto())

    @functools.cached_property
    def _takes_text_as_it_is(self) -> bool:
        """Whether the model was trained on text of which nothing was changed."""
        return bool(self.proto.normalizer_spec.name == "identity")

    def _keeps_whitespace(self) -> bool:
        """Whether the model's flags and its pieces for line feed and tab say so; trained with --keep-whitespace."""
        ids = [self.processor.piece_to_id(piece) for piece in KEPT_BLANKS]
        if self.unk_id in ids:
            return False
        spec, pieces = self.proto.normalizer_spec, self.proto.pieces
        symbols = all(pieces[i].type == USER_DEFINED for i in ids)
        return bool(
            symbols and self._takes_text_as_it_is and spec.add_dummy_prefix and not spec.remove_extra_whitespaces
        )

    def plain(self, text: str) -> str:
        return text if self._takes_text_as_it_is else plain(text)

    def __init__(self, path: Path, sha256: str, model: bytes, not_text: int) -> None:
        processor = sentencepiece.SentencePieceProcessor()
        try:
            parsed = processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError, ValueError) as error:
            raise ValueError(
                f"{path}: neither a SentencePiece model ({str(error).splitlines()[0]:.100}) nor a vocab.txt "
                f"(byte {not_text} is no text)"
            ) from None
        if not parsed or processor.get_piece_size() <= len(SPECIAL_PIECES):
            raise ValueError(f"{path}: not a SentencePiece model, or one without pieces")
        pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        for i, piece in enumerate(SPECIAL_PIECES):
            if pieces[i] != piece:
                raise ValueError(
                    f"{path}: piece {i} must be {piece}, is {pieces[i]!r:.40}; train with `python -m data_prep build`"
                )
        for i, piece in enumerate(SPECIAL_PIECES):
            if not (processor.is_unknown(i) if i == SPECIAL_IDS["unk"] else processor.is_control(i)):
                raise ValueError(f"{path}: piece {piece} must be a control symbol ([UNK]: the unknown one)")
        self.processor = processor
        starts = np.array([p.startswith(WORD_START) for p in pieces], bool)
        shown = [p.removeprefix(WORD_START).replace(WORD_START, " ") for p in pieces]
        super().__init__(path, sha256, shown, SPECIAL_IDS, starts)
        # A piece that holds the mark after its start crosses words; without a dummy prefix a word's first piece
        # depends on whether a space stands before it.
        first = pieces[processor.encode("a")[0]]
        self.word_local = (
            first.startswith(WORD_START)
            and pieces[processor.encode("a a")[0]] == first
            and not any(WORD_START in p[1:].lstrip(WORD_START) for p in pieces)
        )
        self.keeps_whitespace = self.word_local and self._keeps_whitespace()
        if self.keeps_whitespace:  # a word may begin with a line feed or a tab
            begins = [processor.piece_to_id(piece) for piece in KEPT_BLANKS]
            self.word_start[begins] = self.unit_start[begins] = True

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        return self.processor.encode(list(texts), out_type=int, num_threads=threads)

    def encode_chunks(self, chunks: Sequence[str]) -> list[list[int]]:
        # A symbol before a chunk takes the space that the model puts before a text, and no piece holds both.
        encoded = self.processor.encode([KEPT_BLANKS[0] + chunk for chunk in chunks], out_type=int, num_threads=1)
        return [ids[2:] for ids in encoded]

    def encode_inside(self, words: Sequence[str]) -> list[list[int]]:
        return [self._without_space(ids) for ids in self.encode_texts(words)]

    def _without_space(self, ids: list[int]) -> list[int]:
        if not ids or not self.word_start[ids[0]]:
            return ids
        bare = self.pieces[ids[0]][1:]
        if not bare:
            return ids[1:] or ids
        inside = self.processor.piece_to_id(bare)
        return ids if inside == self.unk_id else [inside, *ids[1:]]

    def _encode_with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encoded = self.processor.encode(texts, return_type="offset_mapping", num_threads=1)
        return [(e["ids"], e["offsets"]) for e in encoded]

    def _decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


class _WordPiece(Tokenizer):
    """BERT's tokenizer over the lines of a vocab.txt."""

    kind, file_name = "wordpiece", "vocab.txt"

    def __init__(self, path: Path, sha256: str, text: str, said: Mapping[str, bool | None]) -> None:
        # Its own thread pool would make every later fork print a warning; whoever set the variable meant it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers  # here: a SentencePiece run needs none of it

        pieces = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        ids = {piece: i for i, piece in enumerate(pieces)}
        missing = [piece for piece in SPECIAL_PIECES if piece not in ids]
        if missing:
            raise ValueError(
                f"{path}: not a SentencePiece model and no vocab.txt of BERT's: no line is {' or '.join(missing)}"
            )
        if len(ids) < len(pieces):
            line, piece = next((i, p) for i, p in enumerate(pieces) if ids[p] != i)  # a later one won
            raise ValueError(f"{path}: lines {line + 1} and {ids[piece] + 1} hold the same piece {piece!r:.40}")
        if "" in ids:
            raise ValueError(f"{path}: line {ids[''] + 1} is empty; every line is a piece")
        if ids["[PAD]"] != 0:
            raise ValueError(f"{path}: [PAD] is on line {ids['[PAD]'] + 1}, must be the first (rows end in id 0)")
        if len(pieces) == len(SPECIAL_PIECES):
            raise ValueError(f"{path}: holds special pieces alone")
        cased = any(p != p.lower() and not _in_brackets(p) for p in pieces)
        self._guess = Casing(not cased, not cased)
        lowercase = said.get("lowercase")
        self._guessed = lowercase is None and said.get("strip_accents") is None
        known = {name: value for name, value in said.items() if value is not None}
        of_case = self._guess if lowercase is None else Casing(lowercase, lowercase)
        self.casing = replace(of_case, **known)
        if self.casing != self._guess:
            sha256 = hashlib.sha256(text.encode() + b"\0" + canonical(asdict(self.casing))).hexdigest()
        self.processor = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD)
        )
        self.processor.normalizer = tokenizers.normalizers.BertNormalizer(
            handle_chinese_chars=self.casing.ideographs,
            strip_accents=self.casing.strip_accents,
            lowercase=self.casing.lowercase,
        )
        self.processor.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self.processor.decoder = tokenizers.decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
        special = {name: ids[piece] for name, piece in zip(SPECIAL_IDS, SPECIAL_PIECES, strict=True)}
        starts = np.array([not p.startswith(CONTINUATION) for p in pieces], bool)
        super().__init__(path, sha256, [p.removeprefix(CONTINUATION) for p in pieces], special, starts)

    def files(self) -> dict[str, bytes]:
        if self.casing == self._guess:
            return super().files()
        fields = {FIELDS[name]: value for name, value in asdict(self.casing).items()}
        return super().files() | {CONFIG: canonical(fields)}

    def doubt(self) -> str:
        """Of a guess: dropping accents is what one does to Latin letters, and ruins most other scripts."""
        if not self._guessed or not self.casing.strip_accents:
            return ""
        changed = self.processor.normalizer.normalize_str
        for piece in self.pieces:
            bare = piece.strip()
            if bare[:1] >= "\u0370" and not _in_brackets(bare) and changed(bare).strip() != bare:
                return (
                    f"{self.path}: no {CONFIG} beside it says whether it is cased, and without accents its piece {bare!r:.40} "
                    f"would be {changed(bare).strip()!r:.40}"
                )
        return ""

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        texts = list(texts)
        parts = [texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK)]
        threads = min(len(parts), threads if threads > 0 else os.cpu_count() or 1)
        if threads <= 1:
            return [ids for part in parts for ids in self._encode(part)]
        with ThreadPoolExecutor(threads) as pool:  # the library works without the interpreter lock
            return [ids for part in pool.map(self._encode, parts) for ids in part]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self.processor.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return [(e.ids, e.offsets) for e in self.processor.encode_batch(texts, add_special_tokens=False)]

    def _decode(self, ids: list[int]) -> str:
        vanish = {self.pad_id, self.cls_id, self.sep_id, self.mask_id}
        return self.processor.decode([i for i in ids if i not in vanish], skip_special_tokens=False)

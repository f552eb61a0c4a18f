"""Tokenizers (SentencePiece, WordPiece, any tokenizer.json), identified by the SHA-256 of their file; text yields no special id
but [UNK].

The file is read once, then hashed and parsed. The kind is recognised by content:

    sentencepiece  a SentencePiece model with [PAD], [UNK], [CLS], [SEP] and [MASK] at ids 0 to 4, all but [UNK] control
                   symbols. One that data_prep trained names the normal form of its text in the model's normalizer_spec, and
                   has characters of its own for ▁ and ▅, which SentencePiece reserves
    wordpiece      BERT's published `vocab.txt`: UTF-8, a token a line, [PAD] first, the other special tokens anywhere.
                   The normalisation is not in it but in a tokenizer_config.json beside it, as in Hugging Face's folders,
                   or else in a tokenizer.json there. Without these it is guessed: cased where
                   lower-casing would change some token outside square brackets; otherwise text is lower-cased and loses its
                   accents (Devlin et al. 2019's two releases). If it is not as guessed, the SHA-256 is of both files'
                   content. One that data_prep trained names the normal form of its text there, and keeps the characters
                   that BERT's cleaning drops
    tokenizers     a tokenizer.json (`megabert.data.tokenizer_json`)

"[MASK]" in a document of pre-training is ordinary text: `[`, `mask`, `]`; in a text for a trained model names of special tokens are
these. (transformers' BertTokenizer gives the special id in both, and [UNK] for a word of more than 100 characters, which is cut here;
all other ids are the same.)
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from megabert.common.files import canonical, parse_object
from megabert.data.text import BORDER, Form, begins_unit, prepared

# ids of a SentencePiece model
SPECIAL_IDS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# SentencePiece's mark of a space before the token
WORD_START = "\u2581"
# characters that SentencePiece reserves (of these it shows an unknown token in training as the second), and the noncharacters,
# which cleaned text does not have, for them in a model that data_prep trained
ESCAPES = str.maketrans("\u2581\u2585", "\ufdd0\ufdd1")
RESERVED = {escape: code for code, escape in ESCAPES.items()}
# normal forms of text by their names in the files of a trained tokenizer
FORMS: dict[str, Form] = {"NFC": "NFC", "NFKC": "NFKC", "none": ""}
# WordPiece's mark of a token inside a word
CONTINUATION = "##"
# a token of one byte, in vocabularies with byte fallback
BYTE = re.compile("<0x([0-9A-F]{2})>")
# a model of a million tokens takes about 20 MB
MAX_BYTES = 256 << 20
# characters; a longer word is cut, as it would be [UNK] in BERT
MAX_WORD = 100
# texts encoded at once
CHUNK = 4096

# Hugging Face's file beside a vocab.txt, and its fields by those of `Casing`
CONFIG = "tokenizer_config.json"
CASING_FIELDS = {"lowercase": "do_lower_case", "strip_accents": "strip_accents", "ideographs": "tokenize_chinese_chars"}
# fields of a vocabulary that data_prep trained, which Hugging Face does not have
TRAINED_FIELDS = {"turkic": "turkic_lower_case", "form": "unicode_form"}
# tokenizer classes of Hugging Face that split text like BERT's, with or without "Fast" at the end
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
SPLIT_BY = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}


@dataclass(frozen=True)
class Casing:
    """Normalisation of BERT's tokenizer: lower-case, drop accents (Unicode's non-spacing marks of all scripts), put spaces around
    ideographs.

    `turkic`: in lower case, I is ı and İ is i. `form`: of a vocabulary that data_prep trained, a name of FORMS; its text keeps
    format and private characters. "": a published one, whose text BERT cleans of these.
    """

    lowercase: bool
    strip_accents: bool
    ideographs: bool = True
    turkic: bool = False
    form: str = ""

    def fields(self) -> dict[str, Any]:
        """The fields by name, without those that only a trained vocabulary has and this has not."""
        return {name: value for name, value in asdict(self).items() if value or name not in TRAINED_FIELDS}

    def normalizer(self) -> Any:
        """As an object of the tokenizers library, for text in the form."""
        # With a thread pool the library would warn at every later fork. A variable that the user has set is kept.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import normalizers  # a SentencePiece run does not need it

        bert = normalizers.BertNormalizer(not self.form, self.ideographs, self.strip_accents, self.lowercase)
        return normalizers.Sequence([*turkic_rules(), bert]) if self.turkic else bert


def turkic_rules() -> list[Any]:
    """Normalizers before lower-casing Turkish or Azerbaijani."""
    from tokenizers import normalizers

    return [normalizers.Replace("\u0130", "i"), normalizers.Replace("I", "\u0131")]


def read_casing(path: Path) -> dict[str, Any]:
    """The fields of `Casing` in Hugging Face's tokenizer_config.json; None where it has none.

    Raises ValueError for a damaged file and for a tokenizer that splits text differently from BERT's.
    """
    fields = CASING_FIELDS | {"turkic": TRAINED_FIELDS["turkic"]}
    tree = parse_object(path.read_bytes(), path, "; remove it or save the tokenizer again")
    values = {name: tree.get(field) for name, field in fields.items()}
    refuse_other_tokenizer(tree, path)
    form = tree.get(TRAINED_FIELDS["form"])
    if form is not None and form not in list(FORMS):
        raise ValueError(f"{path}: {TRAINED_FIELDS['form']} is {form!r:.40}, must be one of {', '.join(FORMS)}")
    return checked_casing(values, fields, str(path)) | {"form": form}


def checked_casing(
    values: Mapping[str, Any], fields: Mapping[str, str], where: str, prefix: str = ""
) -> dict[str, bool | None]:
    """`values` of `Casing`, each a bool or None. Raises ValueError naming the file's field that is neither."""
    for name, value in values.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{where}: {prefix}{fields[name]} is {value!r:.40}, must be true or false")
    return dict(values)


def refuse_other_tokenizer(tree: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError naming the field of Hugging Face's file `path` that makes it split text differently from BERT's tokenizer."""
    name = tree.get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in BERT_CLASSES:
        raise ValueError(
            f"{path}: tokenizer_class is {name!r:.60}, whose words are not those of BERT's tokenizer; "
            "take a model that has that one"
        )
    for field, want in SPLIT_BY.items():
        if (value := tree.get(field)) not in (None, want):
            raise ValueError(f"{path}: {field} is {value!r:.60}, only {want!r} is supported")


class Tokenizer:
    """What all kinds share; `load` makes one.

    `tokens` are the texts of the vocabulary, with a space before those that start a word. `word_start` is bool [vocab_size], false
    for special tokens. So is `unit_start`, tokens that begin a word or its equivalent: in scripts without spaces between words
    (Chinese, Japanese, Thai, …) every token does. `word_local`: for any words
    without whitespace in them, encoding `" ".join(words)` equals encoding them one by one. `processor` is the library's
    object, `data` the content of the tokenizer file, whose usual name is `file_name`.
    """

    kind: str
    file_name: str
    # the mark of tokens inside a word; "": tokens that begin a word include the space before it
    continuation = ""
    # Unicode's normal form of cleaned text, "" for none
    form: Form = "NFC"
    processor: Any
    # the protocol buffer of a SentencePiece model
    proto: Any
    data: bytes

    def __init__(
        self, path: Path, sha256: str, tokens: Sequence[str], special_ids: dict[str, int], word_start: np.ndarray
    ) -> None:
        self.path, self.sha256 = path, sha256
        self.vocab_size = len(tokens)
        self.special_ids = dict(special_ids)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (special_ids[name] for name in SPECIAL_IDS)
        self.word_start = word_start
        self.word_start[list(special_ids.values())] = False
        self.unit_start = word_start | np.array([begins_unit(token) for token in tokens], bool)
        self.unit_start[list(special_ids.values())] = False
        self.tokens = [f" {t}" if starts else t for t, starts in zip(tokens, word_start.tolist(), strict=True)]
        self.word_local = True
        # added tokens because of which it is not
        self.crossing: list[str] = []
        # whether a word has other tokens after a space than at the beginning of a text
        self.spaced = False

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tokenizer:
        """Read, hash, parse and check a tokenizer file. ValueError names the file and what is wrong with it.

        Tokens that files beside it add to its vocabulary belong to it.
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
        from megabert.data import tokenizer_json

        if data.lstrip().startswith(b"{"):
            return tokenizer_json.load(path, data)
        casing: dict[str, Any] = {}
        beside = path.with_name(CONFIG)
        if _first_binary_byte(data) is None:
            casing = read_casing(beside) if beside.is_file() else {}
            if casing.get("lowercase") is None and casing.get("strip_accents") is None:
                casing |= tokenizer_json.casing_beside(path)
        return tokenizer_json.with_added(Tokenizer.parse(data, path, casing))

    @staticmethod
    def parse(data: bytes, path: Path, casing: Mapping[str, Any] | None = None) -> Tokenizer:
        """The tokenizer of a file's content `data`; errors as of `load`, which name `path`.

        `casing`: known fields of `Casing`, for a vocab.txt.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        binary = _first_binary_byte(data)
        parsed: Tokenizer
        if binary is None:
            parsed = WordPiece(path, sha256, data.decode(), casing or {})
        else:
            parsed = _SentencePiece(path, sha256, data, binary)
        parsed.data = data
        return parsed

    def files(self) -> dict[str, bytes]:
        """The files from which `load` makes this tokenizer, by name; the first is the one to load."""
        return {self.file_name: self.data}

    def doubt(self) -> str:
        """Why the normalisation may not fit the vocabulary; "" where it is known to."""
        return ""

    def guess(self) -> str:
        """The normalisation where it is guessed, and what to do if it is not so; "" where it is known."""
        return ""

    def predicted(self, causal: bool = False) -> np.ndarray:
        """bool [vocab_size]: the ids that a model predicts, all but the special ones; `causal`: [SEP] too."""
        predicted = np.ones(self.vocab_size, bool)
        predicted[list(self.special_ids.values())] = False
        predicted[self.sep_id] = causal
        return predicted

    def token_bytes(self) -> list[bytes]:
        """UTF-8 of the text of each token, including the space before a word; some are parts of a character."""
        return [bytes.fromhex(match[1]) if (match := BYTE.fullmatch(t)) else t.encode() for t in self.tokens]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        raise NotImplementedError

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word after another word and a space; if not `spaced`, at the beginning of a text."""
        return self.encode_batch(words)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of raw texts, equal to those of a dataset built from them."""
        return self.encode_batch([prepared(text, self.form) for text in texts])

    def encode_inside(self, words: Sequence[str]) -> list[list[int]]:
        """As `encode_texts`, for a tokenizer.json as `encode_batch`, of words without a space before them, as in texts without spaces."""
        return self.encode_texts(words)

    def is_of(self, sha256: str) -> bool:
        """Whether a dataset whose tokenizer has this SHA-256 was built with this tokenizer, or with its file as it is: a WordPiece
        model's `tokenizer.json` is read as its vocabulary where a model is opened."""
        if sha256 == self.sha256:
            return True
        try:
            return sha256 == Tokenizer.load(self.path).sha256
        except (ValueError, OSError):  # only its vocabulary can be read, or it is gone
            return False

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of token ids, without [PAD], [CLS], [SEP] and [MASK]. ValueError for an id outside the vocabulary."""
        listed = [int(i) for i in ids]
        if listed and not (min(listed) >= 0 and max(listed) < self.vocab_size):
            raise ValueError(f"{self.path}: ids to decode must lie in 0..{self.vocab_size - 1}")
        return self._decode(listed)

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError


def without_space(tokenizer: Tokenizer, ids: list[int], bare_id: Callable[[int], int | None]) -> list[int]:
    """`ids` without the space before them: the first is replaced by its token without the space, `bare_id` of it, or removed if
    it is only a space; unchanged where there is no such token."""
    if not ids or not tokenizer.word_start[ids[0]]:
        return ids
    if not tokenizer.tokens[ids[0]][1:]:
        return ids[1:] or ids
    inside = bare_id(ids[0])
    return ids if inside in (None, tokenizer.unk_id) else [inside, *ids[1:]]


def cut_long_words(processor: Any) -> Any:
    """Make a WordPiece tokenizer of the tokenizers library cut words of more characters than its model takes, which would be [UNK],
    into the longest slices that end between syllables, if there is one.

    Returns a copy that does not: it takes a fifth less time for words that are not long.
    """
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    uncut = Tokenizer.from_str(processor.to_str())
    size = processor.model.max_input_chars_per_word
    cut = pre_tokenizers.Split(Regex(rf".{{1,{size}}}(?:\z|{BORDER})|.{{1,{size}}}"), "isolated")
    before = [processor.pre_tokenizer] if processor.pre_tokenizer else []
    processor.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])
    return uncut


def ids_by_library(texts: Sequence[str], uncut: Any, processor: Any, unk_id: int) -> list[list[int]]:
    """Ids of texts by `uncut`, or by `processor` where it makes an [UNK], which may be a long word."""
    parts = (list(texts[i : i + CHUNK]) for i in range(0, len(texts), CHUNK))
    encoded = [e.ids for part in parts for e in uncut.encode_batch_fast(part, add_special_tokens=False)]
    if uncut is not processor and (long := [i for i, ids in enumerate(encoded) if unk_id in ids]):
        again = ids_by_library([texts[i] for i in long], processor, processor, unk_id)
        for i, ids in zip(long, again, strict=True):
            encoded[i] = ids
    return encoded


def _in_brackets(token: str) -> bool:
    return token[:1] == "[" and token[-1:] == "]"


def _first_binary_byte(data: bytes) -> int | None:
    """Offset of the first byte that cannot be in a vocab.txt: a control character or invalid UTF-8. None: all is text.

    Every SentencePiece model has such bytes: its scores are tagged with 0x15.
    """
    control = re.search(rb"[^\t\n\r\x20-\x7e\x80-\xff]", data)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return min(error.start, control.start()) if control else error.start
    return control.start() if control else None


class _SentencePiece(Tokenizer):
    """A SentencePiece model from its bytes; `binary` is the offset of a byte that cannot be in a vocab.txt."""

    kind, file_name = "sentencepiece", "tokenizer.model"

    def __init__(self, path: Path, sha256: str, model: bytes, binary: int) -> None:
        processor = sentencepiece.SentencePieceProcessor()
        try:
            parsed = processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError, ValueError) as error:
            raise ValueError(
                f"{path}: neither a SentencePiece model ({str(error).splitlines()[0]:.100}) nor a vocab.txt "
                f"(byte {binary} is not text)"
            ) from None
        if not parsed or processor.get_piece_size() <= len(SPECIAL_TOKENS):
            raise ValueError(f"{path}: not a SentencePiece model, or one without tokens")
        tokens = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        for i, token in enumerate(SPECIAL_TOKENS):
            if tokens[i] != token:
                raise ValueError(
                    f"{path}: token {i} must be {token}, is {tokens[i]!r:.40}; train with `python -m data_prep build`"
                )
            if not (processor.is_unknown(i) if i == SPECIAL_IDS["unk"] else processor.is_control(i)):
                raise ValueError(f"{path}: token {token} must be a control symbol ([UNK]: the unknown one)")
        self.processor = processor
        starts = np.array([t.startswith(WORD_START) for t in tokens], bool)
        shown = [t.removeprefix(WORD_START).replace(WORD_START, " ").translate(RESERVED) for t in tokens]
        super().__init__(path, sha256, shown, SPECIAL_IDS, starts)
        self.form = FORMS.get(self.proto.normalizer_spec.name, "NFC")
        del self.proto  # rarely needed again
        # A token with the mark after its start crosses words; without a dummy prefix a word's first token depends on
        # whether a space stands before it.
        first = tokens[processor.encode("a")[0]]
        self.word_local = (
            first.startswith(WORD_START)
            and tokens[processor.encode("a a")[0]] == first
            and not any(WORD_START in t[1:].lstrip(WORD_START) for t in tokens)
        )

    @functools.cached_property
    def proto(self) -> Any:
        from sentencepiece import sentencepiece_model_pb2

        messages: Any = sentencepiece_model_pb2
        return messages.ModelProto.FromString(self.processor.serialized_model_proto())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.processor.encode(list(texts), out_type=int, num_threads=1)

    def encode_inside(self, words: Sequence[str]) -> list[list[int]]:
        find, name = self.processor.piece_to_id, self.processor.id_to_piece
        return [without_space(self, ids, lambda i: find(name(i)[1:])) for ids in self.encode_texts(words)]

    def _decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids).translate(RESERVED)


class WordPiece(Tokenizer):
    """BERT's tokenizer over the lines of a vocab.txt."""

    kind, file_name, continuation = "wordpiece", "vocab.txt", CONTINUATION

    def __init__(self, path: Path, sha256: str, text: str, casing: Mapping[str, Any]) -> None:
        import tokenizers

        tokens = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        ids = _checked_ids(tokens, path)
        cased = any(t != t.lower() and not _in_brackets(t) for t in tokens)
        self._guess = Casing(not cased, not cased)
        known = {name: value for name, value in casing.items() if value is not None}
        self._guessed = known.keys().isdisjoint({"lowercase", "strip_accents"})
        base = Casing(known["lowercase"], known["lowercase"]) if "lowercase" in known else self._guess
        self.casing = replace(base, **known)
        if self.casing != self._guess:
            sha256 = hashlib.sha256(text.encode() + b"\0" + canonical(self.casing.fields())).hexdigest()
        self.form = FORMS[self.casing.form or "NFC"]
        self.processor = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD)
        )
        self.processor.normalizer = self.casing.normalizer()
        self.processor.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self.processor.decoder = tokenizers.decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
        self._uncut = cut_long_words(self.processor)
        special = {name: ids[token] for name, token in zip(SPECIAL_IDS, SPECIAL_TOKENS, strict=True)}
        starts = np.array([not t.startswith(CONTINUATION) for t in tokens], bool)
        super().__init__(path, sha256, [t.removeprefix(CONTINUATION) for t in tokens], special, starts)

    def files(self) -> dict[str, bytes]:
        if self.casing == self._guess:
            return super().files()
        fields = {(CASING_FIELDS | TRAINED_FIELDS)[name]: value for name, value in self.casing.fields().items()}
        return super().files() | {CONFIG: canonical(fields)}

    def doubt(self) -> str:
        """For a guessed normalisation: dropping accents suits Latin letters and destroys most other scripts."""
        if not self._guessed or not self.casing.strip_accents:
            return ""
        normalise = self.processor.normalizer.normalize_str
        for token in self.tokens:
            bare = token.strip()
            if bare[:1] >= "\u0370" and not _in_brackets(bare) and normalise(bare).strip() != bare:
                return (
                    f"{self.path}: no {CONFIG} beside it says whether it is cased, and without accents its token {bare!r:.40} "
                    f"would be {normalise(bare).strip()!r:.40}"
                )
        return ""

    def guess(self) -> str:
        if not self._guessed:
            return ""
        how = "lower-cased and without accents" if self.casing.lowercase else "cased"
        other = "false" if self.casing.lowercase else "true"
        return (
            f"{self.path}: no {CONFIG} beside it says whether it is cased; by its tokens text is {how}: if not, put "
            f'{{"do_lower_case": {other}}} into one there'
        )

    def as_json(self) -> bytes:
        """The tokenizer.json of it, without the cutting of long words."""
        return self._uncut.to_str().encode()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return ids_by_library(texts, self._uncut, self.processor, self.unk_id)

    def _decode(self, ids: list[int]) -> str:
        hidden = {self.pad_id, self.cls_id, self.sep_id, self.mask_id}
        return self.processor.decode([i for i in ids if i not in hidden], skip_special_tokens=False)


def _checked_ids(tokens: list[str], path: Path) -> dict[str, int]:
    """Id of each token of a vocab.txt. Raises ValueError naming the invalid line."""
    ids = {token: i for i, token in enumerate(tokens)}
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise ValueError(
            f"{path}: not a SentencePiece model and no vocab.txt of BERT's: no line is {' or '.join(missing)}"
        )
    if len(ids) < len(tokens):
        line, token = next((i, t) for i, t in enumerate(tokens) if ids[t] != i)
        raise ValueError(f"{path}: lines {line + 1} and {ids[token] + 1} hold the same token {token!r:.40}")
    if "" in ids:
        raise ValueError(f"{path}: line {ids[''] + 1} is empty; every line is a token")
    if ids["[PAD]"] != 0:
        raise ValueError(f"{path}: [PAD] is on line {ids['[PAD]'] + 1}, must be the first (rows end in id 0)")
    if len(tokens) == len(SPECIAL_TOKENS):
        raise ValueError(f"{path}: holds special tokens alone")
    return ids

"""Tokenizers as those of Hugging Face's library, which give the same ids as ours for every text, and encoding of texts as they do.

`tokenizer.json` is built from the tokenizer file alone: a SentencePiece model's character map, tokens, scores and flags, the
lines of a vocab.txt, or a tokenizer.json, of which the template and the special tokens' flags change. The first two stand behind
the cleaning of texts that `megabert.data.text.prepared` does; a tokenizer.json keeps the normalizer that it has. What else it cannot
express is refused by name. After a mask the library puts a space where a text begins with one. Three differences remain, all of them
the `tokenizers` library's:

    a special token that a text spells out ("[MASK]") becomes the special id, which filling it in needs
    it sums a unigram model's scores in fp64 and word by word, SentencePiece in fp32 over the whole text: where two
        segmentations score the same up to rounding, either may win (never in a model that data_prep trained: its
        scores have exact sums)
    in a model with SentencePiece's own character map it cannot compose what takes more than five bytes (kana and a
        separate voicing mark, Hangul in separate letters) nor two marks at once, and composes some marks after
        characters that are replaced themselves; NFC text has next to none of these
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megabert.data.text import BORDER, CLOSING, CONTROLS, GLUED, INVISIBLE, SPACES, Form, escaped
from megabert.data.text import MAX_WORD as MAX_SLICE
from megabert.data.tokenizer import (
    CONTINUATION,
    ESCAPES,
    FORMS,
    MAX_WORD,
    SPECIAL_TOKENS,
    WORD_START,
    Tokenizer,
    ids_by_library,
    turkic_rules,
)
from megabert.data.tokenizer_json import FastTokenizer

if TYPE_CHECKING:
    import torch

# SentencePiece's numbers of the types of tokens and of models
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# normalization rules that give the same text in both libraries
RULES = ("nmt_nfkc", "nmt_nfkc_cf", "identity")
# a character that every rule but identity deletes
SEPARATOR = "\x01"
DELETED = r"[\x01-\x08\x0B\x0E-\x1F\x7F\x{8F}\x{9F}]"
EXTENDS = r"\p{M}\x{200C}\x{200D}\x{E33}\x{EB3}\x{FF9E}\x{FF9F}"
# noncharacters, which cleaned text does not have: a space before a word, and the beginning of a stretch of text
SPACE, BEGIN = "\ufdd2", "\ufdd3"


@functools.lru_cache(maxsize=8)
def exported(tokenizer: Tokenizer) -> Any:
    """`build` of the tokenizer; None for a model that it refuses."""
    try:
        return build(tokenizer)
    except ValueError:
        return None


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of raw texts for a trained model, without [CLS] and [SEP], equal to those of the exported tokenizer: a special token
    that a text spells out is one."""
    library = exported(tokenizer)
    if library is None:
        return [_encode_marked(tokenizer, text) for text in texts]
    if isinstance(tokenizer, FastTokenizer):
        return ids_by_library(texts, library, library, tokenizer.unk_id)
    # several times as fast as the library for a SentencePiece model
    ids = tokenizer.encode_texts(texts)
    special = re.compile("|".join(re.escape(token.content) for token in library.get_added_tokens_decoder().values()))
    for i, text in enumerate(texts):
        if special.search(text):
            ids[i] = library.encode(text, add_special_tokens=False).ids
    return ids


def _encode_marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """`encode` of a text for a tokenizer that is not exported."""
    names = {tokenizer.tokens[i]: i for i in tokenizer.special_ids.values()}
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    before, *rest = map(str.rstrip, parts)
    ids = [*tokenizer.encode_texts([before])[0]]
    for name, part in zip(rest[::2], rest[1::2], strict=True):
        encode = tokenizer.encode_texts if part[:1].isspace() else tokenizer.encode_inside
        ids += [names[name], *encode([part])[0]]
    return ids


def pad_encoded(tokenizer: Tokenizer, texts: str | Sequence[str]) -> torch.Tensor:
    """int32 [n, T]: `[CLS] text [SEP]` of each text, padded with id 0; an input of the model's `forward`. Names of special tokens in a
    text are these tokens, and so is "[MASK]". Raises ValueError without a text, and as `list_texts`."""
    import torch

    if not (given := list_texts(texts)):
        raise ValueError("no texts; give one at least")
    named = [text.replace(SPECIAL_TOKENS[-1], tokenizer.tokens[tokenizer.mask_id]) for text in given]
    encoded = encode(tokenizer, named)
    rows = [torch.tensor([tokenizer.cls_id, *ids, tokenizer.sep_id], dtype=torch.int32) for ids in encoded]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)


def list_texts(texts: Any) -> list[str]:
    """A text or several as a list. Raises TypeError naming what is no text, ValueError one with half a character, which UTF-8 cannot
    hold."""
    if not isinstance(texts, str | Iterable):
        raise TypeError(f"texts: expected str, or several, got {type(texts).__name__}")
    given = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(given):
        if not isinstance(text, str):
            raise TypeError(f"texts[{number}]: expected str, got {type(text).__name__}")
        if half := re.search("[\ud800-\udfff]", text):
            raise ValueError(f"texts[{number}]: has {half[0]!r}, which is half a character; remove or replace it")
    return given


def build(tokenizer: Tokenizer, separators: int = 1) -> Any:
    """A `tokenizers.Tokenizer` with the ids of `tokenizer`, and `[CLS] A [SEP] B [SEP]` with segments around them, with `separators`
    [SEP] between A and B.

    Raises ValueError naming the property of the SentencePiece model that cannot be expressed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    sentencepiece = tokenizer.kind == "sentencepiece"
    if isinstance(tokenizer, FastTokenizer):
        return _from_json(tokenizer, separators)
    built = _from_sentencepiece(tokenizer) if sentencepiece else _from_wordpiece(tokenizer)
    controls = [piece.piece for piece in tokenizer.proto.pieces if piece.type == CONTROL] if sentencepiece else []
    for token in dict.fromkeys([*SPECIAL_TOKENS, *controls]):
        # SentencePiece's mask stands for a word and the space before it, BERT's for the word alone.
        strip = sentencepiece and token == "[MASK]"
        built.add_special_tokens([tokenizers.AddedToken(token, lstrip=strip, normalized=False, special=True)])
    built.post_processor = _template(tokenizer, separators)
    assert built.get_vocab_size() == tokenizer.vocab_size
    return built


def _template(tokenizer: Tokenizer, separators: int) -> Any:
    from tokenizers.processors import TemplateProcessing

    first, last = tokenizer.tokens[tokenizer.cls_id], tokenizer.tokens[tokenizer.sep_id]
    return TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", *[last] * separators, "$B:1", f"{last}:1"],
        special_tokens=[(first, tokenizer.cls_id), (last, tokenizer.sep_id)],
    )


def _from_json(tokenizer: FastTokenizer, separators: int) -> Any:
    """The file's own tokenizer, with our template; its mask stands for a word and the space before it where tokens hold spaces."""
    import tokenizers
    from tokenizers import pre_tokenizers, processors

    tree = copy.deepcopy(tokenizer.tree)
    added = {entry["id"]: entry for entry in tree["added_tokens"]}
    for i in tokenizer.special_ids.values():
        flags = {"single_word": False, "lstrip": i == tokenizer.mask_id and not tokenizer.continuation, "rstrip": False}
        added[i] = {"id": i, "content": tokenizer.tokens[i], "normalized": False, "special": True} | flags
    tree["added_tokens"] = [added[i] for i in sorted(added)]
    built = tokenizers.Tokenizer.from_str(json.dumps(tree))
    built.no_padding()
    built.no_truncation()
    built.post_processor = _template(tokenizer, separators)
    # offsets of tokens without the space before them
    pre = json.loads(built.to_str())["pre_tokenizer"] or {}
    if pre.get("type") == "Metaspace" and pre["prepend_scheme"] == "always" and pre["split"]:
        before = pre_tokenizers.Split(tokenizers.Regex(f" (?=[^ {pre['replacement']}])"), "removed")
        built.pre_tokenizer = pre_tokenizers.Sequence([before, built.pre_tokenizer])
    for part in [pre, *pre.get("pretokenizers", [])]:
        if part.get("type") == "ByteLevel":
            trimmed = processors.ByteLevel(add_prefix_space=part["add_prefix_space"], trim_offsets=True)
            built.post_processor = processors.Sequence([trimmed, built.post_processor])
    return built


def _from_wordpiece(tokenizer: Tokenizer) -> Any:
    import tokenizers
    from tokenizers import decoders

    built = tokenizers.Tokenizer.from_str(tokenizer.processor.to_str())
    built.normalizer = tokenizers.normalizers.Sequence([*_cleaning(tokenizer.form), built.normalizer])
    built.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
    assert built.model.max_input_chars_per_word == MAX_WORD
    return built


def _from_sentencepiece(tokenizer: Tokenizer) -> Any:
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers

    proto = tokenizer.proto
    _refuse_unknown(tokenizer, proto)
    built = tokenizers.Tokenizer(_unigram(proto) if proto.trainer_spec.model_type == 1 else _bpe(proto))
    spec = proto.normalizer_spec
    rules = _trained_rules(tokenizer) if spec.name in FORMS else _character_rules(tokenizer)
    # A space that is left at the beginning of the text becomes the mark itself.
    scheme = "first" if spec.remove_extra_whitespaces and spec.add_dummy_prefix else "never"
    if spec.remove_extra_whitespaces:
        rules += [normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
        ends = [r" +\z"] if spec.add_dummy_prefix else [r" +\z", r"\A +"]
        rules += [normalizers.Replace(tokenizers.Regex(end), "") for end in ends]
    elif spec.add_dummy_prefix:
        rules += [normalizers.Prepend(" ")]
    built.normalizer = normalizers.Sequence(rules)
    # a token with the mark after its start spans words
    split = not any(WORD_START in piece.piece[1:] for piece in proto.pieces if piece.type == NORMAL)
    built.pre_tokenizer = pre_tokenizers.Metaspace(WORD_START, scheme, split)
    if split and spec.remove_extra_whitespaces and (spec.name in FORMS or spec.precompiled_charsmap):
        # The same, but the mark belongs to the word's first character, so that offsets are without the space: spaces are removed and
        # marks put before all words, also that which begins a stretch after a special token, where it is removed again.
        built.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(SPACE, scheme, split=False),
                pre_tokenizers.Metaspace(BEGIN, "always", split=False),
                pre_tokenizers.Split(SPACE, "removed"),
                pre_tokenizers.Metaspace(WORD_START, "always", split=False),
                pre_tokenizers.Split(WORD_START + BEGIN, "removed"),
            ]
        )
    if proto.trainer_spec.byte_fallback:
        parts = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
        built.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    else:
        built.decoder = decoders.Metaspace(WORD_START, "first")
        if spec.name in FORMS:
            reserved = [decoders.Replace(chr(escape), chr(code)) for code, escape in ESCAPES.items()]
            built.decoder = decoders.Sequence([built.decoder, *reserved])
    before = " " if spec.add_dummy_prefix and not spec.remove_extra_whitespaces else ""  # as for any text
    for piece in proto.pieces:
        if piece.type == USER_DEFINED and built.normalizer.normalize_str(piece.piece) != before + piece.piece:
            raise ValueError(
                f"{tokenizer.path}: its user-defined symbol {piece.piece!r:.40} is changed by its own normalization, "
                "which tokenizer.json cannot except it from"
            )
    return built


def _refuse_unknown(tokenizer: Tokenizer, proto: Any) -> None:
    """Raises ValueError for what would give other ids."""
    kind, spec = KINDS[proto.trainer_spec.model_type], proto.normalizer_spec
    rule = spec.name if spec.precompiled_charsmap else "identity"
    symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    problems = {
        f"model_type={kind}": kind not in ("unigram", "bpe"),
        f"normalization_rule_name={rule or 'a table of its own'}": rule not in (*RULES, *FORMS),
        "escape_whitespaces=false": not spec.escape_whitespaces,
        "treat_whitespace_as_suffix=true": proto.trainer_spec.treat_whitespace_as_suffix,
        "tokens marked unused": any(piece.type == UNUSED for piece in proto.pieces),
        "user_defined_symbols of a BPE model": kind == "bpe" and not all(_stands_alone(s, proto) for s in symbols),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"{tokenizer.path}: {problem} cannot be expressed in tokenizer.json")


def _stands_alone(symbol: str, proto: Any) -> bool:
    """Whether a user-defined symbol of a BPE model is one character that no other token has, so that it is never merged."""
    return len(symbol) == 1 and sum(symbol in piece.piece for piece in proto.pieces) == 1


def _trained_rules(tokenizer: Tokenizer) -> list[Any]:
    """The cleaning, and the character map of a model that data_prep trained: the characters for reserved ones, lower case."""
    from tokenizers import normalizers

    rules = [*_cleaning(tokenizer.form), *(normalizers.Replace(chr(c), chr(by)) for c, by in ESCAPES.items())]
    lower = tokenizer.processor.normalize("I")[-1]
    if lower == "\u0131":
        rules += turkic_rules()
    return rules if lower == "I" else [*rules, normalizers.Lowercase()]


def _character_rules(tokenizer: Tokenizer) -> list[Any]:
    """The model's character map, made exact on what the library does differently.

    The library looks up a cluster of up to five bytes as a whole and replaces all of it by the mapping of its first characters,
    so that marks after them are lost. Separated characters are separate clusters; a second pass composes what belongs together.
    A deleted character at the beginning of a text stays, so these are deleted once more.
    """
    from tokenizers import Regex, normalizers

    spec = tokenizer.proto.normalizer_spec
    cleaning = _cleaning("NFC", " " if spec.remove_extra_whitespaces else "")
    if not spec.precompiled_charsmap:
        return cleaning
    try:
        mapped = normalizers.Precompiled(spec.precompiled_charsmap)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{tokenizer.path}: its character map is damaged ({error!s:.100})") from None
    return [
        *cleaning,
        normalizers.Replace(Regex(rf"(?=[{EXTENDS}])|(?<=\r)(?=\n)"), SEPARATOR),
        mapped,
        normalizers.Replace(Regex(r"(?<=\p{M})(?=\p{M})"), SEPARATOR),
        mapped,
        normalizers.Replace(Regex(DELETED), ""),
    ]


def _cleaning(form: Form, first: str = " ") -> list[Any]:
    """What `megabert.data.text.prepared` does.

    The library puts the mark of a space only before a text whose first character is left: `first` stands for deleted ones.
    """
    from tokenizers import Regex, normalizers

    marks, closing, longer = escaped(GLUED), escaped(CLOSING), rf"(?=\S{{{MAX_SLICE + 1}}})"
    rules = [
        normalizers.Replace(Regex(CONTROLS.pattern), " "),
        normalizers.Replace(Regex(rf"[{marks}]+[{closing}]*\K(?=[^\s{marks}{closing}])"), " "),
        normalizers.Replace(Regex(SPACES.pattern), " "),
        normalizers.Replace(Regex(rf"{longer}(?:\S{{1,{MAX_SLICE}}}{BORDER}|\S{{{MAX_SLICE}}})\K"), " "),
        normalizers.Replace(Regex(rf"\A(?:{INVISIBLE.pattern})+"), first),
        normalizers.Replace(Regex(INVISIBLE.pattern), ""),
    ]
    if form == "NFKC":
        newer = (c for c in map(chr, range(0x110000)) if unicodedata.decomposition(c)[:1] == "<")
        change = normalizers.NFKC()
        pairs = [(c, unicodedata.normalize(form, c)) for c in newer]
        rules += [normalizers.Replace(c, by) for c, by in pairs if change.normalize_str(c) != by]
        return [*rules, change]
    return [*rules, normalizers.NFC()] if form else rules


def _unigram(proto: Any) -> Any:
    from tokenizers import models

    best = max(piece.score for piece in proto.pieces if piece.type == NORMAL)
    # user-defined ones as the library itself scores them, so that they always win
    vocabulary = [
        (p.piece, len(p.piece.encode()) * best - 0.1 if p.type == USER_DEFINED else p.score) for p in proto.pieces
    ]
    unknown = next(i for i, piece in enumerate(proto.pieces) if piece.type == UNKNOWN)
    return models.Unigram(vocabulary, unknown, proto.trainer_spec.byte_fallback)


def _bpe(proto: Any) -> Any:
    """SentencePiece merges the neighbours that make the best token: every way to make a token is a merge of its rank."""
    from tokenizers import models

    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    merges = []
    for piece in sorted(scores, key=lambda piece: (-scores[piece], ids[piece])):
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        merges += [(left, right) for left, right in cuts if left in scores and right in scores]
    return models.BPE(
        vocab=ids, merges=merges, unk_token="[UNK]", fuse_unk=True, byte_fallback=proto.trainer_spec.byte_fallback
    )

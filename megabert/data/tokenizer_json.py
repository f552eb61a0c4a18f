"""Tokenizers from a `tokenizer.json` of Hugging Face's library: byte-level BPE, Unigram, WordPiece.

The special tokens are named by a tokenizer_config.json or special_tokens_map.json beside the file (`cls_token` or
`bos_token`, `sep_token` or `eos_token`, …), else the usual names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.files import canonical
from megabert.data import tokenizer as base
from megabert.data.tokenizer import BYTE, CONFIG, SPECIAL_IDS, Tokenizer, without_space

SPECIAL_MAP = "special_tokens_map.json"
USUAL = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>", "<bos>"),
    "sep": ("[SEP]", "<sep>", "</s>", "<eos>"),
    "mask": ("[MASK]", "<mask>"),
}
# roles with other names in Hugging Face's files
INSTEAD = {"cls": "bos", "sep": "eos"}
# words to test whether tokens cross words
WORDS_TRIED = 512
# GPT-2's character of each byte (Radford et al. 2019): itself if printable, the others from 256 on
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
CHARACTERS = (*PRINTABLE, *sorted({*range(256)} - {*PRINTABLE}))
BYTE_OF = {chr(b if b in PRINTABLE else 256 + i - len(PRINTABLE)): b for i, b in enumerate(CHARACTERS)}


def names_beside(path: Path) -> dict[str, str]:
    """Special tokens by role (pad, cls, …), from the files beside a tokenizer.json."""
    names: dict[str, str] = {}
    for file in (path.with_name(SPECIAL_MAP), path.with_name(CONFIG)):
        if not file.is_file():
            continue
        tree = _object(file.read_bytes(), file)
        for role in SPECIAL_IDS:
            value = tree.get(f"{role}_token") or tree.get(f"{INSTEAD.get(role)}_token")
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names[role] = value
    return names


def _object(data: bytes, path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error!s:.100})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: must hold one JSON object")
    return tree


class FastTokenizer(Tokenizer):
    """A tokenizer.json from its bytes; `named`: its known special tokens by role."""

    kind, file_name = "tokenizers", "tokenizer.json"

    def __init__(self, path: Path, data: bytes, named: Mapping[str, str]) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        self.tree = _object(data, path)
        try:
            self.processor = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: not a tokenizer.json of the tokenizers library ({error!s:.100})") from None
        self.processor.no_padding()
        self.processor.no_truncation()
        self._uncut = self.processor
        if isinstance(self.processor.model, tokenizers.models.WordPiece):
            self._uncut = base.cut_long_words(self.processor)
            self.tree["pre_tokenizer"] = json.loads(self.processor.to_str())["pre_tokenizer"]
        # the name of a special token in a text is ordinary text
        self.processor.encode_special_tokens = self._uncut.encode_special_tokens = True
        vocabulary = self.processor.get_vocab(with_added_tokens=True)
        self._usual, self._named = _special_names(vocabulary, {}, path), _special_names(vocabulary, named, path)
        if missing := [role for role in SPECIAL_IDS if role not in self._named and role != "unk"]:
            role = missing[0]
            raise ValueError(
                f"{path}: has no {role} token (none of {', '.join(USUAL[role])}); add one, or name it as {role}_token in a "
                f"{CONFIG} beside it"
            )
        special = {role: vocabulary[self._named[role]] for role in SPECIAL_IDS if role in self._named}
        # padding is determined by lengths, so its token may also have another role (EuroBERT's is also the last)
        apart = [i for role, i in special.items() if role != "pad"]
        if len(set(apart)) < len(apart):
            raise ValueError(f"{path}: two of its special tokens are one: {self._named}; each needs a token of its own")
        if special["sep"] == 0:
            raise ValueError(
                f"{path}: {self._named['sep']} has id 0, with which rows are filled up; give it another place"
            )
        # without one no text needs it
        special.setdefault("unk", special["pad"])
        sha256 = hashlib.sha256(data)
        if self._named != self._usual:
            sha256.update(b"\0" + canonical(self._named))
        self._raw = [""] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            self._raw[i] = token
        shown, starts = self._shown(path, special)
        super().__init__(path, sha256.hexdigest(), shown, special, starts)
        self.data = data
        self.continuation = self.tree["model"].get("continuing_subword_prefix") or ""
        self._hidden = {*special.values()} - {self.unk_id}
        self._find_words()

    def _shown(self, path: Path, special: Mapping[str, int]) -> tuple[list[str], np.ndarray]:
        """The texts of the tokens without a space before them, and bool [vocab_size]: which have one. Raises ValueError if the
        tokens do not mark it."""
        model = self.tree["model"]
        if model.get("end_of_word_suffix"):
            raise ValueError(f"{path}: its tokens mark the ends of words (end_of_word_suffix), not where words begin")
        if prefix := model.get("continuing_subword_prefix"):
            return [t.removeprefix(prefix) for t in self._raw], np.array([not t.startswith(prefix) for t in self._raw])
        # after another token, since blanks at the beginning of a text may be stripped
        before = self.processor.encode("a", add_special_tokens=False).ids[-1:] or [special["mask"]]
        decode = self.processor.decode_batch
        length = len(decode([before], skip_special_tokens=False)[0])
        after = decode([[*before, i] for i in range(len(self._raw))], skip_special_tokens=False)
        shown = [text[length:] for text in after]
        starts = np.array([text.startswith(" ") for text in shown])
        if starts.all() or not starts.any():
            raise ValueError(
                f"{path}: its tokens do not show where words begin: its decoder gives {'every' if starts.all() else 'no'} token a "
                "space before; train one with a ByteLevel, Metaspace or WordPiece decoder"
            )
        return [text.removeprefix(" ") for text in shown], starts

    def _find_words(self) -> None:
        """Set `spaced` and `word_local` by encoding test words."""
        one, two, spaced = self.encode_batch(["a", "a a", " a"])
        self.spaced = two != one + one and two == one + spaced
        words = [t.strip() for t in self.tokens]
        words = [t for i, t in enumerate(words) if len(t.split()) == 1 and "\ufffd" not in t and i not in self._hidden]
        words = words[:: -(-len(words) // WORDS_TRIED) or 1]
        apart = [i for ids in (self.encode_batch(words[:1]) + self.encode_words(words[1:])) for i in ids]
        crossing = any(t[1:].strip() and " " in t[1:].strip() for t in self.tokens)
        self.word_local = not crossing and self.encode_batch([" ".join(words)])[0] == apart

    def files(self) -> dict[str, bytes]:
        if self._named == self._usual:
            return super().files()
        return super().files() | {CONFIG: canonical({f"{role}_token": token for role, token in self._named.items()})}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = base.ids_by_library(texts, self._uncut, self.processor, self.unk_id)
        return [self._without_special(ids) for ids in encoded]

    def _without_special(self, ids: list[int]) -> list[int]:
        """Replace special tokens by unknown ones: a unigram model finds them in a text like any other token."""
        return ids if self._hidden.isdisjoint(ids) else [self.unk_id if i in self._hidden else i for i in ids]

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return self.encode_batch([f" {word}" for word in words] if self.spaced else words)

    def token_bytes(self) -> list[bytes]:
        return [_bytes_of(token, raw) for token, raw in zip(self.tokens, self._raw, strict=True)]

    def encode_inside(self, words: Sequence[str]) -> list[list[int]]:
        encoded = self.encode_texts(words)
        if self.spaced or self.continuation:
            return encoded
        return [without_space(self, ids, lambda i: self.processor.token_to_id(self._raw[i][1:])) for ids in encoded]

    def _encode_with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encoded = self.processor.encode_batch(texts, add_special_tokens=False)
        return [(self._without_special(e.ids), e.offsets) for e in encoded]

    def _decode(self, ids: list[int]) -> str:
        return str(self.processor.decode([i for i in ids if i not in self._hidden], skip_special_tokens=False))


def _bytes_of(token: str, raw: str) -> bytes:
    """UTF-8 of a token whose text is `token` and which the file has as `raw`."""
    if "\ufffd" not in token:
        return token.encode()
    match = BYTE.fullmatch(raw)
    return (
        bytes.fromhex(match[1]) if match else b"".join(bytes([BYTE_OF[c]]) if c in BYTE_OF else c.encode() for c in raw)
    )


def _special_names(vocabulary: Mapping[str, int], named: Mapping[str, str], path: Path) -> dict[str, str]:
    """The special tokens by role. Raises ValueError for one that is named but not in the vocabulary."""
    for role, token in named.items():
        if token not in vocabulary:
            raise ValueError(f"{path}: has no token {token!r:.40}, which the files beside it name as its {role}_token")
    usual = {role: token for role, tokens in USUAL.items() for token in tokens[::-1] if token in vocabulary}
    return usual | dict(named)

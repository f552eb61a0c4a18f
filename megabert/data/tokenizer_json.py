"""Tokenizers from a `tokenizer.json` of Hugging Face's library: byte-level BPE, Unigram, WordPiece.

The special tokens are named by a tokenizer_config.json or special_tokens_map.json beside the file (`cls_token` or
`bos_token`, `sep_token` or `eos_token`, …), else the usual names. Tokens that were added to a vocabulary are in the file or in those
beside it (`added_tokens_beside`), and are found in a text as transformers finds them. A vocab.json with merges.txt beside it
(RoBERTa's layout) is read as the tokenizer.json of the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.files import canonical, parse_object
from megabert.data import tokenizer as base
from megabert.data.tokenizer import BYTE, CONFIG, SPECIAL_IDS, SPECIAL_TOKENS, Tokenizer, without_space

SPECIAL_MAP, ADDED, MERGES, JSON = "special_tokens_map.json", "added_tokens.json", "merges.txt", "tokenizer.json"
MODEL_CONFIG = "config.json"
# values of its model_type whose tokenizer is BERT's unless another is named
BERT_TYPES = ("bert", "distilbert", "electra", "megatron-bert", "nomic_bert")
# of an added token, beside its content and id
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
USUAL = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>", "<bos>"),
    "sep": ("[SEP]", "<sep>", "</s>", "<eos>"),
    "mask": ("[MASK]", "<mask>"),
}
# roles with other names in Hugging Face's files
INSTEAD = {"cls": "bos", "sep": "eos"}
# fields of BERT's normalizer by those of `Casing`
NORMALIZER = {"lowercase": "lowercase", "strip_accents": "strip_accents", "ideographs": "handle_chinese_chars"}
# words to test whether tokens cross words
WORDS_TRIED = 512
# GPT-2's character of each byte (Radford et al. 2019): itself if printable, the others from 256 on
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
CHARACTERS = (*PRINTABLE, *sorted({*range(256)} - {*PRINTABLE}))
BYTE_OF = {chr(b if b in PRINTABLE else 256 + i - len(PRINTABLE)): b for i, b in enumerate(CHARACTERS)}


def names_beside(path: Path, instead: Mapping[str, str] = INSTEAD) -> dict[str, str]:
    """Special tokens by role (pad, cls, …), from the files beside a tokenizer's; `instead`: other names of roles there."""
    names: dict[str, str] = {}
    for tree in (_beside(path, SPECIAL_MAP), _beside(path, CONFIG)):
        for role in SPECIAL_IDS:
            value = tree.get(f"{role}_token") or tree.get(f"{instead.get(role)}_token")
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names[role] = value
    return names


def renamed_beside(path: Path) -> dict[str, str]:
    """`names_beside` a WordPiece vocabulary that are not BERT's; {} where all are."""
    named = names_beside(path, {})
    return named if set(named.values()) - set(SPECIAL_TOKENS) else {}


def added_tokens_beside(path: Path, roles: bool = False) -> list[dict[str, Any]]:
    """The tokens that the files in the folder of `path` add to its vocabulary, in the order of their ids, as entries of a
    tokenizer.json's `added_tokens`; id None: the next free one. With `roles` also special tokens that have a role.

    Raises ValueError naming a file that is not as transformers writes it.
    """
    config, named = _beside(path, CONFIG), _beside(path, SPECIAL_MAP)
    try:
        listed = [tree[name] for tree in (config, named) for name in ("bos_token", "eos_token") if tree.get(name)]
        extra = [tree.get("extra_special_tokens") or [] for tree in (config, named)]
        for part in (*extra, *(tree.get("additional_special_tokens") or [] for tree in (config, named))):
            listed += part.values() if isinstance(part, dict) else part
        tokens = [(i, token) for i, token in (config.get("added_tokens_decoder") or {}).items()]
        for token, i in () if tokens else _beside(path, ADDED).items():
            special = any(token in part for part in extra)
            tokens.append((i, {"content": token, "normalized": not special, "special": special}))
        tokens += [(token["id"], token) for token in _beside(path, JSON).get("added_tokens") or []]
        entries = {entry["content"]: entry for entry in (_entry(None, token) for token in listed)}
        entries |= {entry["content"]: entry for entry in (_entry(int(i), token) for i, token in tokens)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.parent}: its files name added tokens not as transformers does ({error!r:.80})"
        ) from None
    names = names_beside(path)
    for role, usual in () if roles else USUAL.items():
        for name in [names[role]] if role in names else usual:
            entries.pop(name, None)
    return sorted(entries.values(), key=lambda entry: (entry["id"] is None, entry["id"] or 0))


def _entry(i: int | None, token: Any) -> dict[str, Any]:
    token = {"content": token, "special": True} if isinstance(token, str) else token
    flags = {"normalized": not token.get("special")} | token
    if not isinstance(token["content"], str):
        raise TypeError(token)
    return {"id": i, "content": token["content"]} | {name: bool(flags.get(name)) for name in FLAGS}


def _beside(path: Path, name: str) -> dict[str, Any]:
    file = path.with_name(name)
    return parse_object(file.read_bytes(), file) if file.is_file() else {}


def load(path: Path, data: bytes) -> FastTokenizer:
    """The tokenizer of a tokenizer.json or a vocab.json with merges.txt, with the tokens that the files beside it add."""
    tree, merges = parse_object(data, path), path.with_name(MERGES)
    if not isinstance(tree.get("model"), dict) and merges.is_file():  # RoBERTa's vocabulary has the word "model"
        data = _of_merges(path, merges)
    else:
        parts = {"normalizer": bert_normalizer(tree, path), "pre_tokenizer": _byte_level(tree, path)}
        if any(tree.get(name) != part for name, part in parts.items()):
            data = json.dumps(tree | parts, ensure_ascii=False).encode()
    return FastTokenizer(path, data, names_beside(path), added_tokens_beside(path, roles=True))


def bert_normalizer(tree: Mapping[str, Any], path: Path) -> Any:
    """The normalizer of a tokenizer.json `tree`; that of BERT has the fields of the tokenizer_config.json beside it, where that names
    its class, or the model's type implies it, as in transformers."""
    normalizer, config = tree.get("normalizer"), _beside(path, CONFIG)
    if "do_lower_case" not in config:
        return normalizer
    implied = base.BERT_CLASSES[0] if _beside(path, MODEL_CONFIG).get("model_type") in BERT_TYPES else ""
    named = str(config.get("tokenizer_class") or implied).removesuffix("Fast") in base.BERT_CLASSES[:3]
    if not named or not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        return normalizer
    base.read_casing(path.with_name(CONFIG))
    fields = {NORMALIZER[name]: config[field] for name, field in base.CASING_FIELDS.items() if field in config}
    return normalizer | {"strip_accents": None} | fields


def _byte_level(tree: Mapping[str, Any], path: Path) -> Any:
    """The pre-tokenizer of a tokenizer.json `tree`; that of RoBERTa has `add_prefix_space` of the tokenizer_config.json beside it,
    under the conditions of `bert_normalizer`."""
    before, config = tree.get("pre_tokenizer"), _beside(path, CONFIG)
    implied = "RobertaTokenizer" if _beside(path, MODEL_CONFIG).get("model_type") == "roberta" else ""
    named = str(config.get("tokenizer_class") or implied).removesuffix("Fast") in ("RobertaTokenizer", "GPT2Tokenizer")
    space = config.get("add_prefix_space")
    if not named or not isinstance(space, bool) or not isinstance(before, dict) or before.get("type") != "ByteLevel":
        return before
    return before | {"add_prefix_space": space}


def casing_beside(path: Path) -> dict[str, bool | None]:
    """The fields of `Casing` that BERT's normalizer in a tokenizer.json beside a vocab.txt has; {} without one."""
    normalizer = _beside(path, JSON).get("normalizer")
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        return {}
    values = {name: normalizer.get(field) for name, field in NORMALIZER.items()}
    return base.checked_casing(values, NORMALIZER, str(path.with_name(JSON)), "normalizer.")


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of a vocab.txt or a SentencePiece model with the tokens that the files beside it add, if there are any.

    Raises ValueError naming those that a SentencePiece model without a tokenizer.json beside it cannot have.
    """
    path = tokenizer.path
    known, named = set(SPECIAL_TOKENS), renamed_beside(path)
    if not isinstance(tokenizer, base.WordPiece):
        named, known = {}, {tokenizer.processor.id_to_piece(i) for i in range(tokenizer.vocab_size)}
    added = [entry for entry in added_tokens_beside(path) if entry["content"] not in known]
    whole = path.with_name(JSON)
    if not (added or named) or whole == path:
        return tokenizer
    if whole.is_file():
        return load(whole, whole.read_bytes())
    if not isinstance(tokenizer, base.WordPiece):
        shown = ", ".join(f"{entry['content']!r:.40}" for entry in added[:4])
        raise ValueError(
            f"{path}: the files beside it add {shown}{', …' * (len(added) > 4)} to its tokens, which needs a tokenizer.json: save the "
            "tokenizer with transformers' save_pretrained"
        )
    return FastTokenizer(path, tokenizer.as_json(), named, added, tokenizer.doubt())


def _of_merges(path: Path, merges: Path) -> bytes:
    """The tokenizer.json of RoBERTa's files."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    try:
        made = Library(models.BPE.from_file(str(path), str(merges)))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: with {merges.name} no vocabulary of byte-level BPE ({error!s:.100})") from None
    made.pre_tokenizer = pre_tokenizers.ByteLevel(bool(_beside(path, CONFIG).get("add_prefix_space")))
    made.decoder = decoders.ByteLevel()
    return made.to_str().encode()


class FastTokenizer(Tokenizer):
    """A tokenizer.json from its bytes; `named`: its known special tokens by role; `added`: tokens to add, as of
    `added_tokens_beside`."""

    kind, file_name = "tokenizers", "tokenizer.json"

    def __init__(
        self,
        path: Path,
        data: bytes,
        named: Mapping[str, str],
        added: Sequence[Mapping[str, Any]] = (),
        doubt: str = "",
    ) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        self.path, self.tree, self._doubt = path, {"added_tokens": []} | parse_object(data, path), doubt
        try:
            self.processor = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: not a tokenizer.json of the tokenizers library ({error!s:.100})") from None
        vocabulary = self.processor.get_vocab(with_added_tokens=True)
        known = vocabulary | {entry["content"]: entry["id"] for entry in added if entry["id"] is not None}
        self._usual, self._named = _special_names(known, {}, path), _special_names(known, named, path)
        data = self._add(data, added, vocabulary)
        self.processor.no_padding()
        self.processor.no_truncation()
        self._uncut = self.processor
        if isinstance(self.processor.model, tokenizers.models.WordPiece):
            self._uncut = base.cut_long_words(self.processor)
            self.tree["pre_tokenizer"] = json.loads(self.processor.to_str())["pre_tokenizer"]
        # the name of a special token in a text is ordinary text
        self.processor.encode_special_tokens = self._uncut.encode_special_tokens = True
        vocabulary = self.processor.get_vocab(with_added_tokens=True)
        by_id = {i: token for token, i in vocabulary.items()}
        for token, i in vocabulary.items():
            if by_id[i] != token:
                raise ValueError(f"{path}: its tokens {token!r:.40} and {by_id[i]!r:.40} both have the id {i}")
        if dropout := self.tree["model"].get("dropout"):
            raise ValueError(f"{path}: model.dropout={dropout} gives a text other tokens each time; set it to null")
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
        self._raw = [by_id.get(i, "") for i in range(max(by_id) + 1)]
        shown, starts = self._shown(path, special)
        super().__init__(path, sha256.hexdigest(), shown, special, starts)
        self.data = data
        self.continuation = self.tree["model"].get("continuing_subword_prefix") or ""
        self._hidden = {i for role, i in special.items() if role != "unk"}
        self._find_words()

    def _add(self, data: bytes, added: Sequence[Mapping[str, Any]], vocabulary: Mapping[str, int]) -> bytes:
        """Add tokens that the file lacks; in texts all but those of the roles are found. Returns the file with them.

        Raises ValueError naming the tokens that cannot have their ids.
        """
        import tokenizers

        roles, there = set(self._named.values()), {entry["content"] for entry in self.tree["added_tokens"]}
        added = [entry for entry in added if entry["content"] not in roles or entry["content"] not in vocabulary]
        new = [entry for entry in added if entry["content"] not in there]
        for entry in new:
            flags = {name: entry[name] for name in FLAGS}
            self.processor.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        found = {entry["content"]: self.processor.token_to_id(entry["content"]) for entry in added}
        if wrong := [entry for entry in added if entry["id"] not in (None, found[entry["content"]])]:
            shown = ", ".join(f"{entry['content']!r:.40} ({entry['id']})" for entry in wrong[:4])
            raise ValueError(
                f"{self.path}: the ids of its added tokens {shown}{', …' * (len(wrong) > 4)} are not those after its vocabulary; "
                "save the tokenizer again with transformers' save_pretrained"
            )
        if new:
            data = self.processor.to_str().encode()
            self.tree = json.loads(data)
        entries = self.tree["added_tokens"]
        if any(entry["special"] and entry["content"] not in roles for entry in entries):
            plain = [entry | {"special": entry["special"] and entry["content"] in roles} for entry in entries]
            self.processor = tokenizers.Tokenizer.from_str(json.dumps(self.tree | {"added_tokens": plain}))
        return data

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
        added = [entry["content"] for entry in self.tree["added_tokens"] if entry["id"] not in self._hidden]
        added = [token for token in added if token.split()]
        # an added token may need the space before it where other words do not
        self.spaced = self.spaced or not all(self._is_local(["a", *token.split(), "a"]) for token in added)
        # one that takes the space behind it may take that of another added token alone
        ends = {entry["lstrip"]: entry["content"] for entry in self.tree["added_tokens"] if entry["content"] in added}

        def is_local(token: str) -> bool:
            return all(self._is_local(["a", *token.split(), *end.split()]) for end in ("a", *ends.values()))

        self.crossing = [token for token in added if not is_local(token)]
        crossing = any(t[1:].strip() and " " in t[1:].strip() for t in self.tokens)
        self.word_local = not (crossing or self.crossing) and self._is_local(words)

    def _is_local(self, words: Sequence[str]) -> bool:
        """Whether the words have the same tokens together as one by one."""
        whole, *first = self.encode_batch([" ".join(words), *words[:1]])
        return whole == [i for ids in first + self.encode_words(words[1:]) for i in ids]

    def doubt(self) -> str:
        return self._doubt

    def files(self) -> dict[str, bytes]:
        if self._named == self._usual:
            return super().files()
        return super().files() | {CONFIG: canonical({f"{role}_token": token for role, token in self._named.items()})}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = base.ids_by_library(texts, self._uncut, self.processor, self.unk_id)
        for n, ids in enumerate(encoded):
            if not self._hidden.isdisjoint(ids):  # a unigram model finds special tokens in a text like any other token
                encoded[n] = [self.unk_id if i in self._hidden else i for i in ids]
        return encoded

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return self.encode_batch([f" {word}" for word in words] if self.spaced else words)

    def token_bytes(self) -> list[bytes]:
        return [_token_to_bytes(token, raw) for token, raw in zip(self.tokens, self._raw, strict=True)]

    def encode_inside(self, words: Sequence[str]) -> list[list[int]]:
        encoded = self.encode_batch(words)
        if self.continuation:
            return encoded
        return [without_space(self, ids, lambda i: self.processor.token_to_id(self._raw[i][1:])) for ids in encoded]

    def _decode(self, ids: list[int]) -> str:
        return str(self.processor.decode([i for i in ids if i not in self._hidden], skip_special_tokens=False))


def _token_to_bytes(token: str, raw: str) -> bytes:
    """UTF-8 of a token whose text is `token` and which the file has as `raw`."""
    if "\ufffd" not in token:
        return token.encode()
    if match := BYTE.fullmatch(raw):
        return bytes.fromhex(match[1])
    return b"".join(bytes([BYTE_OF[c]]) if c in BYTE_OF else c.encode() for c in raw)


def _special_names(vocabulary: Mapping[str, int], named: Mapping[str, str], path: Path) -> dict[str, str]:
    """The special tokens by role. Raises ValueError for one that is named but not in the vocabulary."""
    for role, token in named.items():
        if token not in vocabulary:
            raise ValueError(f"{path}: has no token {token!r:.40}, which the files beside it name as its {role}_token")
    usual = {role: token for role, tokens in USUAL.items() for token in tokens[::-1] if token in vocabulary}
    return usual | dict(named)

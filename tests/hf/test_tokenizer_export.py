"""What AutoTokenizer makes of the files has the ids of ours, for every kind of tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import sentencepiece_model_pb2

from megabert.data.tokenizer import Tokenizer
from megabert.hf import tokenizer_export
from tests.helpers import runs, tokenizers, wordpiece

MODELS: dict[str, dict[str, Any]] = {
    "unigram": {}, "bpe": {"model_type": "bpe"}, "lowercase": {"normalization_rule_name": "nmt_nfkc_cf"},
    "bytes": {"byte_fallback": True, "vocab_size": 400},
    "bpe-bytes": {"byte_fallback": True, "vocab_size": 400, "model_type": "bpe"},
    "symbols": {"user_defined_symbols": "<sep>,fox", "control_symbols": "[MASK],<other>"},
    "no-prefix": {"add_dummy_prefix": False}, "spaces-kept": {"remove_extra_whitespaces": False},
    "identity": {"normalization_rule_name": "identity"},
    "across-words": {"split_by_whitespace": False, "model_type": "bpe", "vocab_size": 200},
}  # fmt: skip
SPACES = ["", " ", "  \t ", " a", "a  b", "\u3000the\u00a0\u00a0sea ", "\u200bthe", "\ufefffox", "a\r\nb", "\x01the"]
MARKS = ["(\u00a0\u0334\u00a0)", "M\u0325r", "e\u0301 a\u0323", "q\u0302\u0323", "\uff21\u0301", "x\ufe0f", "\ufe0f"]
TEXTS = [*runs.TEXT[:3], *SPACES, *MARKS, *wordpiece.odd_texts(500)]
SYMBOLS = ["the <sep> fox", "the<sep>fox", "<sep>", "foxfox <sep>the", "<other the", "<0x41>"]
THAI, KHMER = "เด็กนักเรียนกำลังอ่านหนังสือที่น่าสนใจมากในห้องสมุด", "ខ្ញុំកំពុងអានសៀវភៅដ៏គួរឱ្យចាប់អារម្មណ៍"


def load_sentencepiece(folder: Path, **changes: Any) -> Tokenizer:
    path = folder / "tokenizer.model"
    path.write_bytes(runs.sentencepiece_model(**changes))
    return Tokenizer.load(path)


def differing(tokenizer: Tokenizer, peer: Any, texts: list[str]) -> list[str]:
    theirs = peer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    ours = tokenizer.encode_texts(texts)
    assert sum(map(len, ours)) > len(texts)
    return [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b]


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_a_sentencepiece_model_are_ours(name: str, tmp_path: Path) -> None:
    tokenizer = load_sentencepiece(tmp_path, **MODELS[name])
    peer = tokenizers.peer(tokenizer, tmp_path / "hf")
    assert not differing(tokenizer, peer, TEXTS + (SYMBOLS if name == "symbols" else []))
    ids = list(range(tokenizer.vocab_size))
    assert len(peer) == len(ids)
    assert peer.convert_ids_to_tokens(ids) == [tokenizer.processor.id_to_piece(i) for i in ids]


@pytest.mark.parametrize("kind", ["uncased", "cased", "published"])
def test_ids_of_a_vocab_txt_are_ours(kind: str, tmp_path: Path) -> None:
    path = wordpiece.published() if kind == "published" else wordpiece.write(tmp_path / "v", kind == "cased")
    if kind == "cased":
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    tokenizer = Tokenizer.load(path)
    peer = tokenizers.peer(tokenizer, tmp_path / "hf")
    assert b"\r" not in (tmp_path / "hf" / "vocab.txt").read_bytes()
    assert not differing(tokenizer, peer, TEXTS) and len(peer) == tokenizer.vocab_size


@pytest.mark.parametrize("kind", ["unigram", "uncased", "thai"])
def test_long_words_have_our_ids(kind: str, tmp_path: Path) -> None:
    """Of more than the 100 characters that WordPiece takes, and of more than the 512 at which every text is cut."""
    if kind != "thai":
        tokenizer = tokenizers.make(tmp_path, kind)
    else:
        tokenizer = Tokenizer.load(wordpiece.write_letters(tmp_path / "vocab.txt", THAI + KHMER))
    peer = tokenizers.peer(tokenizer, tmp_path / "hf")
    thai, khmer, base64 = THAI * 30, KHMER * 30, "SGVsbG8gd29ybGQ" * 100
    sizes = (99, 100, 101, 199, 200, 201, 511, 512, 513, 600, 1100)
    texts = [f"the {word[:size]} fox" for word in (thai, khmer, base64) for size in sizes]
    texts += ["the " + "q\u0323" * 300, "\u0302" * 700, "https://" + "a-b_c/" * 100, "\ufeff" + "fox" * 200]
    assert not differing(tokenizer, peer, texts)
    if kind == "thai":
        assert all(tokenizer.unk_id not in ids for ids in tokenizer.encode_texts([thai, khmer]))


def test_long_words_of_a_tokenizer_json_are_cut(tmp_path: Path) -> None:
    """Of a WordPiece one, in its exported file too, also when that is read and exported again."""
    by_vocab = Tokenizer.load(wordpiece.write(tmp_path / "vocab.txt"))
    tree = json.loads(tokenizer_export.build(by_vocab).to_str()) | {"pre_tokenizer": {"type": "BertPreTokenizer"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    word = "fox" * 100
    want = by_vocab.encode_texts([word])
    assert by_vocab.unk_id not in want[0]
    for turn in range(3):
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
        assert tokenizer.kind == "tokenizers" and tokenizer.encode_texts([word]) == want
        peer = tokenizers.peer(tokenizer, tmp_path / f"hf{turn}")
        assert not differing(tokenizer, peer, [word, "the fox"])
        (tmp_path / "tokenizer.json").write_bytes((tmp_path / f"hf{turn}" / "tokenizer.json").read_bytes())


@pytest.mark.parametrize("kind", runs.KINDS)
def test_special_tokens_stand_where_bert_has_them(kind: str, tmp_path: Path) -> None:
    tokenizer = runs.tokenizer(tmp_path / "run", kind)
    peer = tokenizers.peer(tokenizer, tmp_path / "hf", 64)
    ours = {name: getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "cls", "sep", "mask")}
    assert {name: getattr(peer, f"{name}_token_id") for name in ours} == ours
    assert peer.model_max_length == 64
    first, second = tokenizer.encode_batch(["the fox", "sea shells"])
    made = peer("the fox", "sea shells")
    assert made["input_ids"] == [ours["cls"], *first, ours["sep"], *second, ours["sep"]]
    assert made["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert peer("the fox")["input_ids"] == [ours["cls"], *first, ours["sep"]]
    assert peer.decode(first) == "the fox"
    # what stands around a mask keeps its ids: the space before belongs to it, punctuation after it starts no word
    for text, word in (("the fox, she sells", "fox"), ("sea shells", "sea"), ("the sea", "sea")):
        before, _, after = text.partition(word)
        kept, whole, middle = tokenizer.encode_batch([before, text, word])
        assert whole[: len(kept) + len(middle)] == kept + middle
        want = [*kept, tokenizer.mask_id, *whole[len(kept) + len(middle) :]]
        assert peer(f"{before}[MASK]{after}", add_special_tokens=False)["input_ids"] == want
        masks = [*kept, peer.mask_token_id, peer.mask_token_id]
        assert peer(f"{before}[MASK] [MASK]", add_special_tokens=False)["input_ids"] == masks


def test_what_the_format_cannot_express_is_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"model_type": "char", "vocab_size": 40}, "model_type=char"),
        ({"normalization_rule_name": "nfkc"}, "normalization_rule_name=nfkc"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix=true"),
        ({"user_defined_symbols": "<sep>", "model_type": "bpe"}, "user_defined_symbols of a BPE model"),
        ({"user_defined_symbols": "\ufb01"}, "user-defined symbol '\ufb01' is changed by its own normalization"),
    ):
        tokenizer = load_sentencepiece(tmp_path, **changes)
        with pytest.raises(ValueError, match=r"tokenizer\.json") as caught:
            tokenizer_export.build(tokenizer)
        assert message in str(caught.value) and str(tokenizer.path) in str(caught.value)
    messages: Any = sentencepiece_model_pb2
    proto = messages.ModelProto.FromString(runs.sentencepiece_model())
    proto.pieces[50].type = tokenizer_export.UNUSED
    (tmp_path / "m").write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match="tokens marked unused"):
        tokenizer_export.build(Tokenizer.load(tmp_path / "m"))
    proto.pieces[50].type = tokenizer_export.NORMAL
    proto.normalizer_spec.precompiled_charsmap = proto.normalizer_spec.precompiled_charsmap[:-2] + b"\xff\0"
    (tmp_path / "m").write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match="m: its character map is damaged"):
        tokenizer_export.build(Tokenizer.load(tmp_path / "m"))


@pytest.mark.parametrize("kind", runs.KINDS)
def test_special_tokens_are_found_without_an_export(kind: str, tmp_path: Path, monkeypatch) -> None:
    found, texts = runs.tokenizer(tmp_path, kind), ["the [SEP] fox [MASK]. she", "a[SEP]b", "the fox"]
    want = tokenizer_export.encode(found, texts)
    monkeypatch.setattr(tokenizer_export, "exported", lambda _: None)
    assert tokenizer_export.encode(found, texts) == want and [found.sep_id in ids for ids in want] == [
        True,
        True,
        False,
    ]

"""A tokenizer is the file that was hashed, its ids are its library's own, and a malformed file is one clear line."""

import hashlib
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece

from megabert.data.tokenizer import MAX_BYTES, SPECIAL_IDS, SPECIAL_TOKENS, Casing, Tokenizer
from megabert.finetune.offsets import encode_by_sentencepiece, encode_with_offsets
from tests.helpers import runs, wordpiece

TEXT = [*runs.TEXT[:2], "A language model learns which words follow which, and how often they do so."]
KOREAN = [*SPECIAL_TOKENS, "한국", "##어", "책"]


def with_offsets(tokenizer, texts):
    """By SentencePiece itself, or by the exported tokenizer."""
    own = tokenizer.kind == "sentencepiece"
    return (encode_by_sentencepiece if own else encode_with_offsets)(tokenizer, texts)


def train(path, **changes):
    path.write_bytes(runs.sentencepiece_model(character_coverage=1.0, **changes))
    return path


def vocabulary(path, tokens, **config):
    path.mkdir()
    (path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path / "vocab.txt"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture(params=["sentencepiece", "wordpiece"])
def tokenizer(request, path, tmp_path):
    return Tokenizer.load(path if request.param == "sentencepiece" else wordpiece.write(tmp_path / "vocab.txt"))


@pytest.fixture(scope="module", params=["uncased", "cased", "published"])
def vocab(request, tmp_path_factory):
    if request.param == "published":
        return wordpiece.published()
    return wordpiece.write(tmp_path_factory.mktemp("vocab") / "vocab.txt", cased=request.param == "cased")


def test_sentencepiece_ids_are_the_librarys_own(path):
    tokenizer = Tokenizer.load(path)
    plain = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = [*TEXT, "", "shells", "words and shells " * 200]
    got = tokenizer.encode_batch(texts)
    assert [list(ids) for ids in got] == [plain.encode(text) for text in texts]
    assert [tokenizer.decode(ids) for ids in got] == [" ".join(text.split()) for text in texts]
    assert ["".join(tokenizer.tokens[i] for i in ids) for ids in got[:3]] == [f" {text}" for text in TEXT]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.kind == "sentencepiece" and tokenizer.word_local
    assert tokenizer.vocab_size == tokenizer.processor.get_piece_size() == plain.get_piece_size()
    assert tokenizer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_offsets_are_characters_of_the_given_text(tokenizer):
    texts = [*TEXT, "", "  sea\t shells \r\n by\u00a0the\u200b sea ", "(the river)"]
    encoded = with_offsets(tokenizer, texts)
    assert [ids for ids, _ in encoded] == tokenizer.encode_texts(texts)
    for text, (ids, offsets) in zip(texts, encoded, strict=True):
        assert offsets.shape == (len(ids), 2) and offsets.dtype == np.int64
        shown = [text[a:b] for a, b in offsets]
        assert "".join(shown) == "".join(text.replace("\u200b", " ").split())
        assert not any(s != s.strip() for s in shown)
        if tokenizer.kind == "sentencepiece" and text in TEXT:
            assert shown == [tokenizer.tokens[i].strip() for i in ids]
    points = np.concatenate([np.arange(*r) for r in wordpiece.RANGES])
    rng = np.random.default_rng(4)
    odd = ["".join(map(chr, rng.choice(points, 40))) + " sea" for _ in range(300)]
    for text, (ids, offsets) in zip(odd, with_offsets(tokenizer, odd), strict=True):
        assert [ids] == tokenizer.encode_texts([text])
        assert (offsets[:, 0] <= offsets[:, 1]).all() and (np.diff(offsets, axis=0) >= 0).all()
        assert offsets.min() >= 0 and offsets.max() <= len(text)
        last = text[slice(*offsets[-1])]
        assert last and text.endswith(last)
    text = "ﬁne ½ ＳＥＡ e\u0301 Ⅷ sea"  # NFKC makes one character several and several one, BERT drops accents
    ((_, offsets),) = with_offsets(tokenizer, [text])
    covered = set().union(*(range(a, b) for a, b in offsets))
    solid = {i for i, c in enumerate(text) if c != " "}
    assert solid - {text.index("\u0301")} <= covered <= solid
    assert offsets[-1, 1] == len(text) and offsets[-1, 0] >= text.index("sea")


def test_word_local_is_false_where_neighbours_matter(tmp_path):
    for changes in (
        {"split_by_whitespace": False, "model_type": "bpe", "vocab_size": 150},
        {"add_dummy_prefix": False},
    ):
        assert not Tokenizer.load(train(tmp_path / "other.model", **changes)).word_local, changes


def test_a_malformed_file_is_named_in_one_line(path, tmp_path):
    whole = path.read_bytes()
    bad = tmp_path / "bad.model"
    for data in (b"", b"text", b"\x00" * 5000, whole[: len(whole) // 2], whole[:100], whole[::-1]):
        bad.write_bytes(data)
        with pytest.raises(ValueError) as caught:
            Tokenizer.load(bad)
        assert str(bad) in str(caught.value) and "\n" not in str(caught.value)
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, len(whole), 200).tolist():  # a flipped bit is refused or gives another hash: no crash
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        bad.write_bytes(data)
        try:
            assert Tokenizer.load(bad).sha256 != hashlib.sha256(whole).hexdigest()
        except ValueError as error:
            refused += str(bad) in str(error)
    assert refused > 0
    text = wordpiece.write(bad).read_bytes()
    bad.write_bytes(text + b"caf\xe9\n")
    with pytest.raises(ValueError, match=rf"\(byte {len(text) + 3} is not text"):
        Tokenizer.load(bad)
    os.truncate(bad, MAX_BYTES + 1)  # a hole: takes no space
    for missing in (bad, tmp_path / "nothing.model", tmp_path):
        with pytest.raises(ValueError, match=str(missing)):
            Tokenizer.load(missing)


def test_other_special_tokens_are_refused(tmp_path):
    for changes, message in (
        ({"control_symbols": "[MSK]"}, r"token 4 must be \[MASK\]"),
        ({"pad_piece": "<pad>"}, r"token 0 must be \[PAD\]"),
        ({"control_symbols": "", "user_defined_symbols": "[MASK]"}, r"\[MASK\] must be a control symbol"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(train(tmp_path / "other.model", **changes))


def test_wordpiece_ids_are_transformers_own(vocab):
    tokenizer, peer = Tokenizer.load(vocab), wordpiece.peer(vocab)
    assert tokenizer.kind == "wordpiece" and tokenizer.vocab_size == len(peer)
    assert tokenizer.casing.lowercase is peer.do_lower_case and not tokenizer.doubt()
    texts = wordpiece.odd_texts(5000)  # more than are encoded at once
    texts = [text for text in texts if max(map(len, text.split()), default=0) <= 100]
    want = peer(texts, add_special_tokens=False)["input_ids"]
    got = tokenizer.encode_batch(texts)
    wrong = [text for text, a, b in zip(texts, got, want, strict=True) if a != b]
    assert not wrong, wrong[:3]
    assert sum(map(len, got)) > 5000 and tokenizer.encode_batch([]) == []


def test_a_wordpiece_above_100_characters_is_cut(vocab):
    tokenizer, peer = Tokenizer.load(vocab), wordpiece.peer(vocab)
    cases = {
        "a" * 100: ["a" * 100],
        "a" * 101: ["a" * 100, "a"],
        "the " + "sea" * 70 + "-fox": ["the", "sea" * 33 + "s", "ea" + "sea" * 32 + "se", "a" + "sea" * 3, "-", "fox"],
        "https://sea.org/" + "x" * 300: ["https://sea.org/", *["x" * 100] * 3],
    }
    for text, words in cases.items():
        want = [i for ids in peer(words, add_special_tokens=False)["input_ids"] for i in ids]
        assert tokenizer.encode_batch([text]) == [want], text
        assert tokenizer.unk_id not in want
        ((ids, offsets),) = with_offsets(tokenizer, [text])
        assert ids == want and "".join(text[a:b] for a, b in offsets.tolist()) == text.replace(" ", "")


def test_text_yields_no_special_id_but_unknown(tokenizer):
    special = SPECIAL_IDS
    if tokenizer.kind == "wordpiece":
        lines = tokenizer.path.read_text(encoding="utf-8").splitlines()
        special = {name: lines.index(f"[{name.upper()}]") for name in SPECIAL_IDS}
        ordinary = set(range(tokenizer.vocab_size)) - set(special.values())
        assert all(tokenizer.word_start[i] == (not lines[i].startswith("##")) for i in ordinary)
    assert tokenizer.special_ids == special == {name: getattr(tokenizer, f"{name}_id") for name in SPECIAL_IDS}
    assert special["pad"] == 0 and not tokenizer.word_start[list(special.values())].any()
    spelled = "".join(f"[{name.upper()}] " for name in SPECIAL_IDS) + "[MASK]x \x00 \u4e2d"
    ids = {i for text in tokenizer.encode_batch([spelled, spelled.lower(), *wordpiece.odd_texts(200)]) for i in text}
    assert not ids & (set(special.values()) - {special["unk"]})
    word = tokenizer.encode_batch(["the fox"])[0]
    assert tokenizer.decode([special["cls"], *word, special["sep"], 0, special["mask"]]) == "the fox"
    assert tokenizer.decode(np.array(word, np.uint16)) == "the fox"
    for outside in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=rf"ids to decode must lie in 0\.\.{tokenizer.vocab_size - 1}"):
            tokenizer.decode([outside])


def test_words_encode_alone_as_in_a_sentence(vocab):
    """What a cache of words rests on."""
    tokenizer = Tokenizer.load(vocab)
    assert tokenizer.word_local
    for words in map(str.split, wordpiece.odd_texts(500)):
        (whole,) = tokenizer.encode_batch([" ".join(words)])
        assert whole == [i for ids in tokenizer.encode_batch(words) for i in ids], words


def test_the_kind_depends_on_content_alone(tmp_path):
    vocab, windows = wordpiece.write(tmp_path / "tokenizer.model"), tmp_path / "windows"
    windows.write_bytes(vocab.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    model = train(tmp_path / "vocab.txt")
    assert [Tokenizer.load(p).kind for p in (model, vocab, windows)] == ["sentencepiece"] + ["wordpiece"] * 2
    assert Tokenizer.load(windows).tokens == Tokenizer.load(vocab).tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines, "the"], r"lines 12 and \d+ hold the same token 'the'"),
        (lambda lines: [p for p in lines if p != "[MASK]"], r"no line is \[MASK\]"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], r"\[PAD\] is on line 2, must be the first"),
        (lambda lines: [*lines, "", "last"], r"line \d+ is empty"),
        (lambda lines: lines[:1] + [p for p in lines[1:] if p[0] == "[" and p.isupper()], "special tokens alone"),
        (lambda lines: [*lines, "\x00"], r"neither a SentencePiece model .* nor a vocab.txt \(byte \d+ is not text"),
    ],
)  # fmt: skip
def test_a_wrong_vocabulary_is_named_in_one_line(tmp_path, change, message):
    file = wordpiece.write(tmp_path / "vocab.txt")
    lines = change(file.read_text(encoding="utf-8").splitlines())
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.load(file)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


def test_no_warning_after_a_fork(tmp_path):
    """The library's own threads would make a later fork print a warning."""
    program = (
        "import os, sys\nfrom megabert.data.tokenizer import Tokenizer\nt = Tokenizer.load(sys.argv[1])\n"
        "t.encode_batch(['the fox'] * 9000)\npid = os.fork()\n"
        "t.encode_batch(['the fox'] * 9)\nif pid: print(os.waitpid(pid, 0)[1])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", program, str(wordpiece.write(tmp_path / "vocab.txt"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=wordpiece.ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_casing_comes_from_config_or_caller(tmp_path):
    text = "한국어 책"
    by_config = Tokenizer.load(vocabulary(tmp_path / "by_config", KOREAN, do_lower_case=False))
    path = vocabulary(tmp_path / "by_caller", KOREAN)
    by_caller = Tokenizer.parse(path.read_bytes(), path, {"lowercase": True, "strip_accents": False})
    guess = Tokenizer.load(path)
    assert "".join(by_config.tokens[i] for i in by_config.encode_batch([text])[0]).split() == text.split()
    assert by_config.encode_batch([text]) == by_caller.encode_batch([text]) != guess.encode_batch([text])
    assert not by_config.doubt() and not by_caller.doubt()
    assert f"{path}: no tokenizer_config.json beside it" in guess.doubt()
    assert len({by_config.sha256, by_caller.sha256, guess.sha256}) == 3
    assert guess.sha256 == hashlib.sha256(guess.data).hexdigest() and list(guess.files()) == ["vocab.txt"]
    for name, data in by_caller.files().items():  # what is copied into a dataset or a run is the tokenizer
        (tmp_path / name).write_bytes(data)
    again = Tokenizer.load(tmp_path / "vocab.txt")
    assert again.sha256 == by_caller.sha256 and again.casing == by_caller.casing
    assert pickle.loads(pickle.dumps(again)).encode_batch([text]) == by_caller.encode_batch([text])


def test_casing_without_config_is_that_of_a_tokenizer_json(tmp_path):
    """Also where the config beside it does not say it; without these it is guessed, and that is said."""
    path = wordpiece.write(tmp_path / "vocab.txt")
    guess = Tokenizer.load(path)
    assert guess.casing == Casing(True, True)
    assert (
        f"{path}: no tokenizer_config.json beside it says whether it is cased; by its tokens text is lower-cased"
        in guess.guess()
    )
    assert 'put {"do_lower_case": false} into one there' in guess.guess()
    normalizer = {"type": "BertNormalizer", "lowercase": True, "strip_accents": False, "handle_chinese_chars": True}
    path.with_name("tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
    for config in ("", '{"model_max_length": 512}'):
        if config:
            path.with_name("tokenizer_config.json").write_text(config)
        found = Tokenizer.load(path)
        assert found.casing == Casing(True, False) and not found.guess() and found.sha256 != guess.sha256
    path.with_name("tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert Tokenizer.load(path).casing == Casing(True, True)
    path.with_name("tokenizer_config.json").unlink()
    path.with_name("tokenizer.json").write_text(json.dumps({"normalizer": normalizer | {"lowercase": 1}}))
    with pytest.raises(ValueError, match=r"tokenizer\.json: normalizer\.lowercase is 1, must be true or false"):
        Tokenizer.load(path)


def test_a_malformed_casing_config_is_named(tmp_path):
    path = vocabulary(tmp_path / "v", KOREAN)
    for config, message in (
        ('{"do_lower_case": "no"}', r"tokenizer_config.json: do_lower_case is 'no', must be true or false"),
        ('{"unicode_form": "NFD"}', "unicode_form is 'NFD', must be one of NFC, NFKC, none"),
        ('{"unicode_form": ["NFC"]}', r"unicode_form is \['NFC'\], must be one of NFC, NFKC, none"),
        ("[]", "must hold one JSON object; remove it or save the tokenizer again"),
    ):
        path.with_name("tokenizer_config.json").write_text(config)
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(path)


def test_tokens_are_units_in_scripts_without_spaces(tmp_path):
    tokens = [*SPECIAL_TOKENS, "the", "##ing", "中", "文", "##กา", "##ำ", "が", "##か", "ー", "한", "##국"]
    tokenizer = Tokenizer.load(vocabulary(tmp_path / "v", tokens, do_lower_case=False))
    units = [tokens[i] for i in np.flatnonzero(tokenizer.unit_start)]
    assert units == ["the", "中", "文", "##กา", "が", "##か", "ー", "한"]
    assert [tokens[i] for i in np.flatnonzero(tokenizer.word_start)] == ["the", "中", "文", "が", "ー", "한"]

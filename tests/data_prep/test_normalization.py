"""Text → ids → text in twelve scripts and Persian, and the normal forms and casings of trained tokenizers."""

import hashlib
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from data_prep.options import BuildOptions
from data_prep.stages.train_tokenizer import normal_form, train_files
from megabert.data.text import prepared
from megabert.data.tokenizer import Tokenizer
from megabert.finetune.offsets import encode_with_offsets
from megabert.hf import tokenizer_export, tokenizer_folder
from tests.helpers import fast_tokenizers, runs
from tests.helpers.prep_builds import build_here
from tests.helpers.prep_reading import write, write_all
from tests.helpers.prep_texts import ids_of_build

SAMPLES = Path(__file__).parent / "scripts"
# what of a script is easily changed: joiners, marks, compatibility characters, digits, characters that a library reserves
HARD = {
    "am": ["በ፲፱፻፺፱ ዓ.ም. ተወለደ።", "ዋጋው ፻ ብር ነው፤ ውድ አይደለም።", "«እንዴት ነህ፧» አለ።", "ክፍል ፫ ገጽ ፵፪ ይመልከቱ።"],
    "ar": ["مُحَمَّدٌ كَتَبَ الرِّسَالَةَ.", "ﻻ إله ﷲ ﷺ", "العدد ١٢٣٤ في ســـنة ٢٠٢٦.", "قال: «نعم، لا بأس؛ شكرًا»."],
    "el": ["Ἐν ἀρχῇ ἦν ὁ λόγος, καὶ ὁ ῾Οδυσσεύς.", "ΟΔΥΣΣΕΥΣ, Οδυσσεύς· ΐ ΰ ϐ ϑ ϕ", "Α΄ τόμος, 50 μ², 3½ €.", "Ω ≠ ω, ᾳ ῃ ῳ;"],
    "fa": [],
    "hi": ["क्‍ष और क्ष अलग दिखते हैं।", "श्री‌मान जी, ज़्यादा ड़ ढ़ फ़ मत कहिए।", "मूल्य ₹१,२३४.५६ है।", "ॐ नमः शिवाय ॥"],
    "hy": ["և եւ Եվ ﬓ ﬔ", "Գինը ֏1.500 է։", "«Ո՞վ է», — հարցրեց նա։", "Հայերէն՝ ՀԱՅԵՐԵՆ, հայերեն։"],
    "ja": ["㈱東京は①番、㌔と㍻です。", "ｶﾞｷﾞｸﾞ ＡＢＣ１２３ が ぱ", "「ﾊﾛｰ」と言った…？！", "神﨑と髙橋と𠮷野家、〜と～。"],
    "ka": ["ᲡᲐᲥᲐᲠᲗᲕᲔᲚᲝ საქართველო ႠႡ ⴀⴁ", "ფასი 100 ₾ არის.", "„კი“, — თქვა მან.", "ჲ ჳ ჴ ჵ ჶ"],
    "ko": ["ㅋㅋㅋ ㄱㄴㄷ ㈜한국", "값이 ₩1,000이다.", "‘네’라고 했다… 2½ ㎏", "漢字와 한글, 「책」."],
    "ru": ["За́мок и замо́к, ёж и ежик.", "Цена — 10½ ₽ за м², №5.", "«Да», — сказал он… ѣ ѳ ѵ", "Съешь ﬁ ещё x² булок."],
    "th": ["น้ำ ทำ ก็ ฯลฯ ๆ", "ราคา ฿๑๒๓.๔๕ บาท", "เขาพูดว่า “ไป” แล้ว", "ปี พ.ศ. ๒๕๖๙ กรุงเทพฯ"],
    "ur": ["قیمت ۱۲۳۴ روپے ہے۔", "﷽ اللہ ؐ محمدؐ", "کیا؟ ہاں، جی؛ «ٹھیک»۔", "نہ‌کہ میں‌نے"],
    "zh": ["㈠、①、Ⅳ，ＡＢＣ：１２３％", "𠮷𡃁𪚥，价格￥100～200。", "“好”，他说……是吗？", "▁▂▃▄▅▆▇█ a▁b ▁"],
}  # fmt: skip
KINDS = ("unigram", "bpe", "wordpiece", "byte-level")


def sentences(language: str) -> list[str]:
    return [*(SAMPLES / f"{language}.txt").read_text(encoding="utf-8").splitlines(), *HARD[language]]


LINES = [line for language in HARD for line in sentences(language)]


@cache
def files(kind: str, *lines: str, **options: Any) -> dict[str, bytes]:
    made = BuildOptions(model_type=kind, character_coverage=1.0, **options)
    return train_files([prepared(line, normal_form(made)) for line in lines or LINES], made)


def trained(folder: Path, kind: str, *lines: str, **options: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    if kind == "byte-level":
        return Tokenizer.load(fast_tokenizers.write(folder / "tokenizer.json", texts=LINES))
    write_all(folder, files(kind, *lines, **{"vocab_size": 1850 if kind == "unigram" else 2600} | options))
    return Tokenizer.load(folder / ("vocab.txt" if kind == "wordpiece" else "tokenizer.model"))


def same_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text, which are those of a build, with offsets, and of the exported tokenizer.json."""
    built = ids_of_build(texts, tokenizer)
    exported = tokenizer_export.build(tokenizer)
    ids = tokenizer.encode_texts(texts)
    assert ids == built == [found for found, _ in encode_with_offsets(tokenizer, texts)]
    assert ids == [exported.encode(text, add_special_tokens=False).ids for text in texts]
    if tokenizer.kind == "sentencepiece":  # also of characters that become [UNK]
        ours = [tokenizer.processor.normalize(prepared(text, tokenizer.form)).strip("\u2581") for text in texts]
        assert ours == [exported.normalizer.normalize_str(text).strip().replace(" ", "\u2581") for text in texts]
    known = [row for row in ids if tokenizer.unk_id not in row]
    assert [exported.decode(row, skip_special_tokens=False) for row in known] == list(map(tokenizer.decode, known))
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_from_its_ids(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(tmp_path, kind)
    for language in HARD:
        texts = sentences(language)
        assert len(texts) == 20
        # decomposed letters, control and invisible characters, which bytes keep, a word longer than the encoder takes
        odd = [unicodedata.normalize("NFD", text) for text in texts]
        odd += [texts[0].replace(" ", "\x01 \u200b&amp; \x0b"), "".join("".join(texts).split()) * 3]
        for given, ids in zip(texts, same_ids(tokenizer, texts + odd * (kind != "byte-level")), strict=False):
            assert tokenizer.unk_id not in ids or kind == "byte-level"
            text, back = unicodedata.normalize("NFC", given), tokenizer.decode(ids)
            if kind == "wordpiece":  # does not know which words had a space between them
                text, back = text.replace(" ", ""), back.replace(" ", "")
            assert back == text, language


@pytest.mark.parametrize("normalization", ["nfc", "nfkc", "none"])
@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece"])
def test_the_form_is_that_of_the_option(kind: str, normalization: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "خانه\u200cها x² ㈱ cafe\u0301 ﬁ ½ ⑤ a▁b"
    forms = {"nfc": "خانه\u200cها x² ㈱ café ﬁ ½ ⑤ a▁b", "nfkc": "خانه\u200cها x2 (株) café fi 1⁄2 5 a▁b", "none": text}
    want = forms[normalization]
    tokenizer = trained(tmp_path, kind, *[text, *LINES] * 2, normalization=normalization)
    odd = ["ᾳ\u0301 か\u3099 \u1112\u1161\u11ab ﾊﾟ", "M\u0325 q\u0302\u0323 ㋿ \U0001f16c", "ﷺ ¨ ‗", *unlikely()]
    ids, *_ = same_ids(tokenizer, [text, *odd])
    back = tokenizer.decode(ids)
    assert back.replace(" ", "") == want.replace(" ", "") and tokenizer.unk_id not in ids
    assert kind == "wordpiece" or back == want
    folder = write_all(tmp_path / "hf", tokenizer_folder.files(tokenizer, 64))
    again = Tokenizer.load(folder / tokenizer.file_name)
    assert again.sha256 == tokenizer.sha256 and again.encode_texts([text]) == [ids]
    write(folder / "config.json", '{"model_type": "bert"}')
    theirs = AutoTokenizer.from_pretrained(folder)([text, *odd], add_special_tokens=False, verbose=False)
    assert theirs["input_ids"] == tokenizer.encode_texts([text, *odd])


def unlikely() -> list[str]:
    """Texts of characters of all planes."""
    rng = random.Random(0)
    known = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    return ["".join(rng.choices([*known, *"  AaIiİı"], k=30)) for _ in range(300)]


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
@pytest.mark.parametrize("casing", ["any", "tr", "az"])
def test_lower_case_is_that_of_the_language(kind: str, casing: str, tmp_path: Path) -> None:
    text = "IĞDIR İzmir x² ﬁ A\u030aB ISI"
    want = {"any": "iğdir i\u0307zmir x² ﬁ åb isi"}.get(casing, "ığdır izmir x² ﬁ åb ısı")
    tokenizer = trained(tmp_path, kind, *[text, want, *LINES], lowercase=True, casing=casing)
    ids, *_ = same_ids(tokenizer, [text, *unlikely()])
    assert tokenizer.decode(ids) == want and tokenizer.unk_id not in ids


TURKISH = "Kadıköy'de yağmur yağıyordu, İzmir'e giden vapur kalktı. Işıklar söndü. "
ENGLISH = "It was raining in Kadıköy, and the ferry to the islands had left long ago. The lights went out, one by one. "


@pytest.mark.parametrize(("text", "casing", "warns"), [(TURKISH, "any", 1), (TURKISH, "tr", 0), (ENGLISH, "any", 0)])
def test_lowercase_turkish_without_its_casing_is_said(text, casing, warns, tmp_path, capsys) -> None:
    options = {"seq_len": 64, "lowercase": True, "vocab_size": 70, "model_type": "bpe", "workers": 1}
    build_here(write(tmp_path / "in.txt", text * 50), tmp_path / "out", casing=casing, **options)
    lines = [line for line in capsys.readouterr().err.splitlines() if "--casing" in line]
    # 7 of 72 characters
    assert ["9.7% of the sample's characters are ı, İ, ğ" in line for line in lines] == [True] * warns


@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece"])
def test_a_tokenizer_is_trained_to_the_same_bytes(kind: str) -> None:
    options = BuildOptions(model_type=kind, vocab_size=150, lowercase=True)
    lines = sentences("ru") * 3
    assert train_files(lines, options) == train_files(lines, options)


def test_model_of_an_earlier_version_reads_as_before(tmp_path: Path) -> None:
    """Its character map is SentencePiece's nmt_nfkc, and a vocabulary beside a config keeps its digest."""
    old = Tokenizer.load(write(tmp_path / "tokenizer.model", runs.sentencepiece_model()))
    assert old.form == "NFC" and old.encode_texts(["x² ▁ the"]) == old.encode_texts(["x2 the"])
    vocabulary = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n"
    write_all(tmp_path, {"vocab.txt": vocabulary, "tokenizer_config.json": '{"do_lower_case": false}'})
    fields = b'{\n "ideographs": true,\n "lowercase": false,\n "strip_accents": false\n}\n'
    again = Tokenizer.load(tmp_path / "vocab.txt")
    assert again.sha256 == hashlib.sha256(vocabulary + b"\0" + fields).hexdigest()
    assert again.encode_texts(["th\u200ce"]) == [[5]]  # BERT drops a format character

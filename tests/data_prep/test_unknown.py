"""The share of [UNK]: small in scripts without spaces between words, and always reported."""

import random

import pytest

from data_prep.__main__ import main
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.hf import tokenizer_export
from tests.helpers import fast_tokenizers, wordpiece
from tests.helpers.prep_builds import build_here, sequences_of
from tests.helpers.prep_reading import records, write

WORDS = {
    "thai": "เด็ก นักเรียน กำลัง อ่าน หนังสือ ที่ น่าสนใจ มาก ใน ห้องสมุด ของ โรงเรียน ใกล้ แม่น้ำ และ เดิน กลับ บ้าน ตอนเย็น",
    "burmese": "ကျောင်းသား သည် စာကြည့်တိုက် တွင် စာအုပ် ကောင်း တစ်အုပ် ကို ဖတ် နေ ပြီး ညနေ အိမ် သို့ ပြန် လာ ခဲ့ မင်္ဂလာ",
    "khmer": "សិស្ស កំពុង អាន សៀវភៅ ដ៏ គួរឱ្យ ចាប់អារម្មណ៍ នៅ ក្នុង បណ្ណាល័យ ហើយ ដើរ ត្រឡប់ ទៅ ផ្ទះ វិញ នៅ ពេលល្ងាច",
    "lao": "ນັກຮຽນ ກຳລັງ ອ່ານ ປຶ້ມ ທີ່ ໜ້າສົນໃຈ ຫຼາຍ ຢູ່ ໃນ ຫໍສະໝຸດ ຂອງ ໂຮງຮຽນ ແລະ ຍ່າງ ກັບ ບ້ານ ຕອນແລງ",
}
ENGLISH = "the quick brown fox jumps over a lazy dog near the river bank and she sells sea shells by the shore"


def english(count=400):
    rng = random.Random(1)
    return [" ".join(rng.choices(ENGLISH.split(), k=60)) for _ in range(count)]


def documents(language):
    """Of runs of words without spaces, most of them of more than 100 characters."""
    rng = random.Random(7)
    runs = ["".join(rng.choices(WORDS[language].split(), k=rng.randint(20, 60))) for _ in range(300)]
    assert sum(len(run) for run in runs if len(run) > 100) > 0.5 * sum(map(len, runs))
    return [" ".join(runs[i : i + 5]) for i in range(0, len(runs), 5)]


def build(folder, texts, **options):
    path = write(folder / "in.jsonl", records(texts))
    return build_here(path, folder / "out", **{"seq_len": 64, "workers": 1} | options)


@pytest.mark.parametrize("given", [False, True], ids=["trained", "given"])
@pytest.mark.parametrize("language", WORDS)
def test_long_phrases_are_not_unknown(language, given, tmp_path, capsys):
    texts = documents(language)
    options = {"model_type": "wordpiece", "character_coverage": 1, "vocab_size": 300}
    if given:
        options = {"tokenizer": wordpiece.write_letters(tmp_path / "vocab.txt", "".join(texts))}
    report = build(tmp_path, texts, **options)
    none = {"tokens": 0, "characters": 0, "token_share": 0.0, "character_share": 0.0}
    assert report["unknown"] == report["corpora"]["input"]["unknown"] == none
    shown = capsys.readouterr()
    assert "unknown    0 tokens are [UNK] (0.00%), 0 characters are in them (0.00%)\n" in shown.out
    assert "[UNK]" not in shown.err

    tokenizer = Tokenizer.load(Dataset(tmp_path / "out").tokenizer_path)
    decoded = (tokenizer.decode(ids) for ids, *_ in sequences_of(tmp_path / "out"))
    shown = ["".join(text.split()).removeprefix("##") for text in decoded]
    whole = ["".join(text.split()) for text in texts]
    assert all(any(part in text for text in whole) for part in shown)
    exported = tokenizer_export.build(tokenizer)
    assert [exported.encode(text, add_special_tokens=False).ids for text in texts] == tokenizer.encode_texts(texts)


def test_unknown_characters_are_counted(tmp_path, capsys):
    """By file, corpus and number of workers; for WordPiece the whole word is lost."""
    other = [f"the fox ж щука river ж {text}" for text in english(405)[400:]]
    options = {"tokenizer": wordpiece.write_letters(tmp_path / "vocab.txt", ENGLISH), "seq_len": (32, 64)}
    clean, russian = (write(tmp_path / f"{i}.jsonl", records(texts)) for i, texts in enumerate((english(), other)))
    inputs = [f"clean={clean}", f"mixed={russian}"]
    report, again = (build_here(inputs, tmp_path / f"out{n}", workers=n, **options) for n in (1, 2))
    assert report == again
    assert (report["unknown"]["tokens"], report["unknown"]["characters"]) == (3 * 5, (1 + 4 + 1) * 5)
    assert report["corpora"]["clean"]["unknown"]["tokens"] == 0
    mixed = report["corpora"]["mixed"]["unknown"]
    characters = sum(len(text.replace(" ", "")) for text in other)
    assert (mixed["tokens"], mixed["characters"]) == (15, 30)
    assert mixed["character_share"] == round(30 / characters, 6)
    shown = capsys.readouterr()
    (warning,) = set(shown.err.splitlines())
    assert warning.startswith("warning: 15 tokens are [UNK] (") and f"the most in {russian}: " in warning
    assert "--tokenizer" in warning and "--character-coverage 1" in warning
    summary = [line for line in shown.out.splitlines() if line.startswith("unknown ")]
    assert len(summary) == 2 and "15 tokens are [UNK]" in summary[0] and "30 characters" in summary[0]
    assert main(["inspect", str(tmp_path / "out1"), "--rows", "0"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for unit in ("token", "character"):
        assert shown.count(["unknown", unit, "share", str(report["unknown"][f"{unit}_share"])]) == 2  # of both lengths


def test_unknown_characters_of_sentencepiece_are_those_alone(tmp_path):
    assert build(tmp_path / "first", english(), vocab_size=50)["unknown"]["characters"] == 0
    other = [f"{text} foxщукаfox ж river, 文文" for text in english()]
    report = build(tmp_path / "second", other, tokenizer=tmp_path / "first" / "out" / "tokenizer.model")
    # four letters inside a word, one alone, a comma, two ideographs
    assert report["unknown"]["tokens"] == 4 * len({*other}) and report["unknown"]["characters"] == 8 * len({*other})


def test_dropped_documents_and_lines_are_not_counted(tmp_path):
    tokenizer = wordpiece.write_letters(tmp_path / "vocab.txt", ENGLISH)
    texts = [*english(), "щука ж", f"{ENGLISH} {ENGLISH}\nщука\n{ENGLISH}"]
    report = build(tmp_path, texts, tokenizer=tokenizer, filters=("min-words=20", "min-line-words=3"))
    assert report["unknown"]["characters"] == 0


@pytest.mark.parametrize("kind", ["unigram", "bytes", "trained"])
def test_characters_that_become_spaces_are_counted(kind, tmp_path):
    texts = [f"{text} a\u2581b \u2581\x1b[0m" for text in english(60)]
    trained = {"vocab_size": 40, "character_coverage": 1}
    given = {} if kind == "trained" else {"tokenizer": fast_tokenizers.write(tmp_path / "tokenizer.json", kind)}
    lost = {"control characters, now spaces": 60}
    lost |= {"\u2581, a space to the tokenizer": 120} if kind == "unigram" else {}
    assert build(tmp_path, texts, **given or trained)["changed"] == lost

"""Whatever a text is encoded in, it is read as the same characters, in chunks of any size."""

import gzip
import os
from pathlib import Path

import pytest

from data_prep.common.errors import BadInput, Problems
from data_prep.readers import encodings
from tests.helpers.prep_reading import read_all

DATA = Path(os.environ.get("MEGABERT_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
FRENCH = "Longtemps, je me suis couché de bonne heure. Mes yeux se fermaient si vite que je m'endors à l'été.\n"
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.\n"
POLISH = "Wszystkie szczęśliwe rodziny są do siebie podobne, każda nieszczęśliwa jest nieszczęśliwa inaczej.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗い所で泣いていた。\n"
CHINESE = "满纸荒唐言，一把辛酸泪。都云作者痴，谁解其中味？此开卷第一回也。作者自云：因曾历过一番梦幻。\n"
KOREAN = "나는 고양이로소이다. 이름은 아직 없다. 어디서 태어났는지 도무지 짐작이 가지 않는다.\n"
CASES = {
    "latin-1": FRENCH,
    "cp1252": "“" + FRENCH,
    "utf-8": RUSSIAN + CHINESE,
    "utf-8-sig": FRENCH,
    "utf-16": RUSSIAN + "😀" + CHINESE,
    "utf-32": KOREAN,
    "cp1251": RUSSIAN,
    "koi8-r": RUSSIAN,
    "iso8859-2": POLISH,
    "shift_jis": JAPANESE,
    "euc_jp": JAPANESE,
    "gb18030": CHINESE,
    "euc_kr": KOREAN,
}


@pytest.mark.parametrize("name", CASES)
def test_an_encoding_is_told_and_recoded(name, tmp_path):
    text = CASES[name] * 30
    for path, content in (
        (tmp_path / "a.txt", text.encode(name)),
        (tmp_path / "b.gz", gzip.compress(text.encode(name))),
    ):
        path.write_bytes(content)
        assert read_all([path])[0] == [text]


@pytest.mark.parametrize("name", ["utf-16-le", "utf-16-be", "cp1251", "shift_jis", "gb18030", "latin-1", "utf-8"])
def test_a_name_forces_it(name, tmp_path):
    text = {"utf-16-le": RUSSIAN, "utf-16-be": CHINESE, "utf-8": FRENCH}.get(name) or CASES[name]
    (tmp_path / "a.jsonl").write_bytes(('{"text": "' + text.strip() + '"}\n').encode(name))
    assert read_all([tmp_path], encoding=name)[0] == [text.strip()]


@pytest.mark.parametrize("name", ["utf-16", "utf-32", "shift_jis", "gb18030", "cp1251", "euc_jp"])
def test_chunks_that_end_inside_a_character_change_nothing(name):
    text = CASES[name]
    data = text.encode(name)
    for size in range(1, 12):
        chunks = (data[i : i + size] for i in range(0, len(data), size))
        assert b"".join(encodings.recode(chunks, name, "f", Problems("stop"))).decode() == text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("shift_jis", JAPANESE.encode("shift_jis"), b"\x81\xff"),
        ("gb18030", CHINESE.encode("gb18030"), b"\x81\xff"),
        ("cp1252", FRENCH.encode("cp1252"), b"\x81"),
        ("utf-16-le", RUSSIAN.encode("utf-16-le"), b"\0\xdc"),
        ("utf-32-le", RUSSIAN.encode("utf-32-le"), b"\xff\xff\xff\xff"),
    ],
)
def test_undecodable_byte_stops_or_drops(name, good, bad, size):
    data = good + bad + good
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    with pytest.raises(BadInput, match=rf"f: byte {len(good)}: invalid {name}"):
        list(encodings.recode(iter(chunks), name, "f", Problems("stop")))
    found = b"".join(encodings.recode(iter(chunks), name, "f", Problems("skip")))
    assert found.startswith(good.decode(name).encode() + b"\xff") and found.endswith(good.decode(name).encode()[-9:])


def test_only_the_bad_document_is_dropped(tmp_path):
    lines = [b'{"text": "%s"}\n' % RUSSIAN.strip().encode("cp1251") for _ in range(5)]
    lines[2] = lines[2].replace(b'"text": "', b'"text": "\x98')
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    found, problems = read_all([tmp_path], "skip", encoding="cp1251")
    assert found == [RUSSIAN.strip()] * 4 and problems.counts == {"invalid UTF-8": 1}


def test_utf8_with_a_few_bad_bytes_stays_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(RUSSIAN.encode() + b"\xff" + RUSSIAN.encode())
    assert encodings.decide("f", (tmp_path / "a.txt").read_bytes()) == encodings.UTF8


def test_undetectable_encoding_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(128, 256)) * 40 + bytes(range(32, 128)) * 40)
    with pytest.raises(
        BadInput, match=r"a\.txt: not UTF-8, and its encoding can't be detected; name it with --encoding NAME"
    ):
        read_all([tmp_path])
    assert read_all([tmp_path], "skip")[1].counts == {"unknown format": 1}


@pytest.mark.parametrize("name", ["nonsense", "zlib", "base64", "rot13", "\0", "undefined"])
def test_unknown_encoding_is_refused(name, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(BadInput, match=r"--encoding .*: no such text encoding"):
        read_all([tmp_path], encoding=name)

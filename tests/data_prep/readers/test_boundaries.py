"""What a document of plain text is, decided for a folder or an archive by its files."""

import pytest

from data_prep.common.records import Corpus, FileRange, RangeList, ReadOptions
from data_prep.readers import boundaries, tasks
from data_prep.readers.boundaries import TextSample, decide
from data_prep.readers.decompress import PLAIN_CHUNK
from data_prep.readers.streams import HEAD
from tests.helpers.prep_reading import PACK, archive, plan, read_all, write, write_all

WRAPPED = "The lines of this paragraph are wrapped, as those of most books\nare, so that no line of it ends as a sentence does,\nbut for the last one of each paragraph, as this is.\n\n"
SENTENCES = "This corpus has a sentence a line.\nIts documents have blank lines between.\nThat is BERT's format.\n\n"
PARAGRAPHS = "Paragraphs of one long line each, with blank lines between: of a book, or of many documents?\n\n"
LONG = "A paragraph of a web page is a line of its own that is longer than the lines of any book, since nobody wraps it"
WEB = f"{LONG}\nRead more\n{LONG}, and it need not end as a sentence does\n\n"
VERSE = "Shall I compare thee to a day,\nThou art more lovely and more kind,\nRough winds do shake the buds of May\nAnd summer's lease is hard to find.\n\n"
HEADED = " = Title of {} = \n \n First words . \n \n = = A section = = \n \n Text @-@ of it . \n \n"
CHINESE, URDU = "一句一行。\n文档之间有空行。\n\n", "یہ ایک جملہ ہے۔\nیہ دوسرا ہے۔\n\n"
DIALOGUE = '"Where?" asked he.\n"Here," she said, and pointed at the door. It was open.\nHe went out. Nobody saw him.\n"Good night!"\n'


def documents_of(text):
    return f"It is document {text}. It has several sentences. They are on one line.\n"


KINDS = {
    "blank-line": [
        *(SENTENCES * 9, SENTENCES.replace("\n", "\r\n") * 9, SENTENCES.replace("\n", "\r") * 9, SENTENCES * 3),
        *(CHINESE * 9, URDU * 9, WEB * 80, (PARAGRAPHS + SENTENCES + WEB) * 30, "Title\nA text.\n\n" * 99),
    ],
    "line": ["".join(map(documents_of, range(400))), "一句。又一句。\n" * 40],
    "heading": ["".join(map(HEADED.format, range(30))), " \n" + HEADED, "\ufeff" + HEADED],
    "file": [
        *(WRAPPED * 9, WRAPPED.replace("\n\n", "\n") * 99, PARAGRAPHS * 99, VERSE * 40, DIALOGUE * 60, SENTENCES * 2),
        *("A file of a sentence a line.\n" * 900, documents_of("one") * 19, ""),
        WRAPPED * 9 + " = No title of WikiText = \n",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_one_file(kind):
    for head in map(str.encode, KINDS[kind]):
        assert decide([TextSample(head, len(head), whole=True)]) == kind, head[:99]


def count(*inputs, **options):
    """How many documents the inputs have."""
    return len(read_all(inputs, **options)[0])


def test_articles_of_a_folder_stay_whole(tmp_path):
    folder = write_all(tmp_path / "in", {f"{i:02}.txt": SENTENCES * (1 + i % 7) for i in range(40)})
    assert count(folder) == count(folder / "*.txt") == 40
    assert count(folder / "06.txt") == 7
    assert count(folder, text_documents="blank-line") == sum(1 + i % 7 for i in range(40))
    tables = {f"!{i}.jsonl": '{"text": "One."}\n' for i in range(5)}
    assert count(write_all(folder, tables)) == 45
    assert count(write_all(tmp_path / "lines", {f"{i:02}.txt": documents_of(i) * (1 + i) for i in range(40)})) == 40


def test_the_files_of_a_folder_are_split_alike(tmp_path):
    parts = write_all(tmp_path / "in", {f"{i}.txt": SENTENCES * 60 for i in range(5)} | {"5.txt": PARAGRAPHS * 9})
    novels = write_all(tmp_path / "no", {f"{i}.txt": WRAPPED * 60 for i in range(5)} | {"5.txt": SENTENCES * 60})
    assert (count(parts), count(novels), count(parts, novels)) == (309, 6, 315)


@pytest.mark.parametrize("kind", PACK)
def test_packed_collections_are_split(kind, tmp_path):
    text = "".join(f"Title {i}\n{SENTENCES}" for i in range(80)).encode()
    found, _ = read_all([write(tmp_path / f"en.txt.{kind}", PACK[kind](text))])
    assert len(found) == 80 and found[79] == f"Title 79\n{SENTENCES}".rstrip()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_a_folder_of_its_own(kind, tmp_path):
    articles = archive(kind, {f"{i:02}.txt": (SENTENCES * 6).encode() for i in range(10)})
    collection = archive(kind, {f"{size}.txt": (SENTENCES * size).encode() for size in (90, 70)})
    write_all(tmp_path, {f"articles.{kind}": articles, f"collection.{kind}": collection})
    found = [count(tmp_path / name) for name in (f"articles.{kind}", f"collection.{kind}", "")]
    assert found == [10, 160, 170]


def test_headings_of_wikitext_begin_documents_in_any_range(tmp_path, monkeypatch):
    path = write(tmp_path / "wiki.train.tokens", "".join(map(HEADED.format, range(30))))
    whole, _ = read_all([path], format="text")
    assert len(whole) == 30 and all(text.count("First words") == 1 for text in whole)
    monkeypatch.setattr(tasks, "RANGE_BYTES", 100)
    cut, _ = read_all([path], format="text")
    assert [text.split() for text in cut] == [text.split() for text in whole]
    assert sum(len(task.ranges) for task in plan([path], format="text")) > 20


@pytest.mark.parametrize(("kind", "size"), [("line", 90), ("blank-line", 30), ("auto", 30), ("file", 1)])
def test_carriage_returns_end_lines(kind, size, tmp_path, monkeypatch):
    path = write(tmp_path / "mac.txt", SENTENCES.replace("\n", "\r") * 30)
    whole, _ = read_all([path], text_documents=kind)
    assert len(whole) == size and sum(text.count("format") for text in whole) == 30
    monkeypatch.setattr(tasks, "RANGE_BYTES", 150)
    assert read_all([path], text_documents=kind)[0] == whole


def test_a_carriage_return_at_the_end_of_the_head_may_be_half_of_a_line_end(tmp_path):
    text = "a" * (HEAD - 1) + "\r\n" + "Second line.\r\nThird line.\r\n"
    texts, _ = read_all([write(tmp_path / "dos.txt", text)], text_documents="blank-line")
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("head", "body", "text"),
    [
        ('id="1"', "All text.", "All text."),
        ('id="1"', "\nFirst line.\n\nSecond line.\n", "First line.\n\nSecond line.\n"),
        ("", "\nFirst line.\nSecond line.\n", "First line.\nSecond line.\n"),
        ('title="A &amp; B"', "\nA & B\n\nText.\n", "\nText.\n"),
        ('title="A"', "\nA\nText.\n", "Text.\n"),
        ('\ttitle="A"', "\nA\nText.\n", "Text.\n"),
        ('title="A "quoted" > B" url="u"', '\nA "quoted" > B\n\nText > more.\n', "\nText > more.\n"),
        ('title="Other"', "\nA title\n\nText.\n", "\nText.\n"),
        ('title="Other"', "\nA sentence of the text.\n\nText.\n", "A sentence of the text.\n\nText.\n"),
        ('title="Other"', "\nข้อความเดียว\n", "ข้อความเดียว\n"),
        ('title="Other"', "\n&nbsp;\n\nText.\n", "&nbsp;\n\nText.\n"),
        ('title="Other"', "\n\u3000\n\nText.\n", "\u3000\n\nText.\n"),
        ('title="Other"', "\nNo title, for text follows\nText.\n", "No title, for text follows\nText.\n"),
    ],
)
def test_the_title_of_a_doc_element(head, body, text, tmp_path):
    element = f"<doc {head}>{body}</doc>" if head else f"<doc>{body}</doc>"
    assert read_all([write(tmp_path / "wiki_00", element)])[0] == [text]


def test_objects_named_one_by_one_have_their_folder(monkeypatch):
    monkeypatch.setattr(boundaries, "decide_files", lambda some, options: "line" if len(some) == 2 else "")
    paths = ("s3://b/d/x.txt", "s3://b/d/y.txt", "s3://b/all")
    ranges = RangeList(FileRange(path, size=9) for path in (*paths[:2], "s3://b/all/z.txt"))
    found = boundaries.text_documents([Corpus("input", paths)], [ranges], ReadOptions())
    assert found == (("s3://b/d", "line"),)


@pytest.mark.parametrize("kind", ["line", "blank-line"])
@pytest.mark.parametrize("step", [100_000, 1 << 25])
def test_carriage_returns_inside_lines_end_none(kind, step, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RANGE_BYTES", step)
    line = "\ufeff" + "some words\r" * 9000
    path = write(tmp_path / "a.txt", f"{line}\n\nSecond line.\r\n\r\nThird\rline.\n")
    assert len(read_all([path], text_documents=kind)[0]) == 3


def test_a_later_line_end_of_two_bytes_is_one(tmp_path):
    """Also where its bytes are in two chunks."""
    for size in (PLAIN_CHUNK - 1, PLAIN_CHUNK + 8):
        head = ("a" * 99 + "\r") * (PLAIN_CHUNK // 100 + 2)
        path = write(tmp_path / "a.txt", head[:size] + "\r\n" + "b.\rc.\r\rd.")
        assert len(read_all([path], text_documents="blank-line")[0]) == 2


def test_guesses_of_archives_and_single_files_are_known(tmp_path):
    text = "".join(map(documents_of, range(400)))
    folder = write_all(tmp_path / "in", {"a.zip": archive("zip", {"a.txt": text.encode()}), "b.txt": SENTENCES * 9})
    guesses = read_all([folder])[1].guesses
    assert guesses == {"line": {f"{folder}/a.zip": None}}
    few = write_all(tmp_path / "few", {f"!{i:03}.jsonl": '{"text": "One."}\n' for i in range(65)} | {"b.txt": text})
    assert read_all([few])[1].guesses == {"line": {f"{few}/b.txt": None}}
    assert not read_all([folder], text_documents="line")[1].guesses

"""What a document of plain text is, decided for a folder or an archive by its files."""

import io
import tarfile
import zipfile

import pytest

from data_prep.readers import documents
from data_prep.readers.boundaries import TextSample, decide
from tests.helpers.prep_reading import PACK, plan, read_all

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


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (SENTENCES * 9, "blank-line"),
        (SENTENCES.replace("\n", "\r\n") * 9, "blank-line"),
        (SENTENCES.replace("\n", "\r") * 9, "blank-line"),
        (CHINESE * 9, "blank-line"),
        (URDU * 9, "blank-line"),
        (WEB * 80, "blank-line"),
        ((PARAGRAPHS + SENTENCES + WEB) * 30, "blank-line"),
        ("Title\nA text.\n\n" * 99, "blank-line"),
        (SENTENCES * 3, "blank-line"),
        ("".join(map(documents_of, range(400))), "line"),
        ("一句。又一句。\n" * 40, "line"),
        ("".join(map(HEADED.format, range(30))), "heading"),
        (" \n" + HEADED, "heading"),
        (WRAPPED * 9, "file"),
        (WRAPPED.replace("\n\n", "\n") * 99, "file"),
        (PARAGRAPHS * 99, "file"),
        (VERSE * 40, "file"),
        (DIALOGUE * 60, "file"),
        ("A file of a sentence a line.\n" * 900, "file"),
        (documents_of("one") * 19, "file"),
        (SENTENCES * 2, "file"),
        (WRAPPED * 9 + " = No title of WikiText = \n", "file"),
        ("", "file"),
    ],
)
def test_the_kind_of_one_file(text, kind):
    head = text.encode()
    assert decide([TextSample(head, len(head), whole=True)]) == kind


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_articles_of_a_folder_stay_whole(tmp_path):
    articles = {f"{i:02}.txt": SENTENCES * (1 + i % 7) for i in range(40)}
    assert len(read_all([write(tmp_path / "in", articles)])[0]) == 40
    assert len(read_all([tmp_path / "in" / "*.txt"])[0]) == 40
    assert len(read_all([tmp_path / "in" / "06.txt"])[0]) == 7
    assert len(read_all([tmp_path / "in"], text_documents="blank-line")[0]) == sum(1 + i % 7 for i in range(40))
    articles = {f"{i:02}.txt": documents_of(i) * (1 + i) for i in range(40)}
    assert len(read_all([write(tmp_path / "lines", articles)])[0]) == 40


def test_the_files_of_a_folder_are_split_alike(tmp_path):
    parts = {f"{i}.txt": SENTENCES * 60 for i in range(5)} | {"5.txt": PARAGRAPHS * 9}
    assert len(read_all([write(tmp_path / "in", parts)])[0]) == 309
    parts = {f"{i}.txt": WRAPPED * 60 for i in range(5)} | {"5.txt": SENTENCES * 60}
    assert len(read_all([write(tmp_path / "novels", parts)])[0]) == 6
    assert len(read_all([tmp_path / "in", tmp_path / "novels"])[0]) == 315


@pytest.mark.parametrize("kind", PACK)
def test_packed_collections_are_split(kind, tmp_path):
    text = "".join(f"Title {i}\n{SENTENCES}" for i in range(80)).encode()
    found, _ = read_all([write(tmp_path / "in", {f"en.txt.{kind}": PACK[kind](text)})])
    assert len(found) == 80 and found[79] == f"Title 79\n{SENTENCES}".rstrip() + "\n\n" * (kind == "none")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_a_folder_of_its_own(kind, tmp_path):
    def pack(name, files):
        path = tmp_path / f"{name}.{kind}"
        with zipfile.ZipFile(path, "w") if kind == "zip" else tarfile.open(path, "w") as archive:
            for member, text in files.items():
                if kind == "zip":
                    archive.writestr(member, text)
                else:
                    info = tarfile.TarInfo(member)
                    info.size = len(text.encode())
                    archive.addfile(info, io.BytesIO(text.encode()))
        return path

    articles = pack("articles", {f"{i:02}.txt": SENTENCES * 6 for i in range(10)})
    collection = pack("collection", {"part.txt": SENTENCES * 90, "more.txt": SENTENCES * 70})
    assert len(read_all([articles])[0]) == 10
    assert len(read_all([collection])[0]) == 160
    assert len(read_all([tmp_path])[0]) == 170


def test_headings_of_wikitext_begin_documents_in_any_range(tmp_path, monkeypatch):
    path = tmp_path / "wiki.train.tokens"
    path.write_text("".join(map(HEADED.format, range(30))))
    whole, _ = read_all([path], format="text")
    assert len(whole) == 30 and all(text.count("First words") == 1 for text in whole)
    monkeypatch.setattr(documents, "RANGE_BYTES", 100)
    cut, _ = read_all([path], format="text")
    assert [text.split() for text in cut] == [text.split() for text in whole]
    assert sum(len(task.ranges) for task in plan([path], format="text")) > 20


@pytest.mark.parametrize(("kind", "count"), [("line", 90), ("blank-line", 30), ("auto", 30), ("file", 1)])
def test_carriage_returns_end_lines(kind, count, tmp_path, monkeypatch):
    path = tmp_path / "mac.txt"
    path.write_bytes(SENTENCES.replace("\n", "\r").encode() * 30)
    whole, _ = read_all([path], text_documents=kind)
    assert len(whole) == count and sum(text.count("format") for text in whole) == 30
    monkeypatch.setattr(documents, "RANGE_BYTES", 150)
    assert read_all([path], text_documents=kind)[0] == whole


DOC = "<doc{}>\n{}</doc>\n"


@pytest.mark.parametrize(
    ("element", "text"),
    [
        ('<doc id="1">All text.</doc>', "All text."),
        ('<doc id="1">\nFirst line.\n\nSecond line.\n</doc>', "First line.\n\nSecond line.\n"),
        ("<doc>\nFirst line.\nSecond line.\n</doc>", "First line.\nSecond line.\n"),
        ('<doc id="1" title="A &amp; B">\nA & B\n\nText.\n</doc>', "\nText.\n"),
        ('<doc id="1" title="A">\nA\nText.\n</doc>', "Text.\n"),
        ('<doc id="1" title="A "quoted" > B" url="u">\nA "quoted" > B\n\nText > more.\n</doc>', "\nText > more.\n"),
        ('<doc id="1" title="Other">\nA title\n\nText.\n</doc>', "\nText.\n"),
        ('<doc id="1" title="Other">\nA sentence of the text.\n\nText.\n</doc>', "A sentence of the text.\n\nText.\n"),
        (
            '<doc id="1" title="Other">\nNo title, for text follows\nText.\n</doc>',
            "No title, for text follows\nText.\n",
        ),
    ],
)
def test_the_title_of_a_doc_element(element, text, tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(element)
    assert read_all([path])[0] == [text]

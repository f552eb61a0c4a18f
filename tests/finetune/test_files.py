"""Published layouts are read as they are; a mistake in a file or a task is one line that names the place."""

import gzip
import json
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from megabert.finetune.encoding import collect_labels
from megabert.finetune.files import QuestionExample, SentenceExample, TextExample, read
from megabert.finetune.tasks import HUB_CLASSES, PRESETS, Task, custom
from tests.helpers.prep_reading import write

PLAIN = custom("classify", text=["text"], label="label")
PAIR = custom("classify", text=["a", "b"], label="y", id="key")
SCORE = custom("score", text=["a", "b"], label="y")
BY_NUMBER = custom("classify", text=["3"], label="1")
TAG = custom("tag")
SQUAD, SQUAD2 = PRESETS["squad1.1"], PRESETS["squad2.0"]
ZIPPED = gzip.compress(b"text\tlabel\n" + b"a\tx\n" * 1000)
HUB_COLUMNS = {"mnli": ("premise", "hypothesis"), "qnli": ("question", "sentence"), "qqp": ("question1", "question2")}


def squad(*qas: dict, context: str = "Ada met Bob in Rome.") -> dict:
    return {"version": "x", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}


def qa(identity: str = "q1", *answers: tuple[str, int], **more) -> dict:
    listed = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": identity, "question": "Who?", "answers": listed} | more


# first lines as GLUE's own files have them (texts shortened)
GLUE = {
    "cola": ("gj04\t1\t\tOur friends won't buy this.\ngj04\t0\t*\tThey drank the pub.\n", "1", None),
    "sst2": ("sentence\tlabel\nhide new secretions \t0\nthat loves its characters \t1\n", "0", None),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
        '1\t702876\t702977\tHe called him "the witness.\tHe said "so.\r\n0\t1\t2\tYucaipa\tSafeway\r\n',
        *("1", 'He said "so.'),
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tcaptions\tMSRvid\t2012\t1\tnone\tnone\tA plane.\tAn air plane.\t5.000\n"
        "1\tcaptions\tMSRvid\t2012\t4\tnone\tnone\tA man.\tA woman.\t3.8\n",
        *(5.0, "An air plane."),
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n133273\t213221\t213222\tHow?\tWhy?\t0\n"
        '7\t8\t9\tWas it?\t"\n"\tWas he a figure?\t0\n4\t5\t6\tA?\tB?\t1\n',  # the middle row is cut at a line end
        *("0", "Why?"),
    ),
}


@pytest.mark.parametrize("name", GLUE)
def test_glue_files_are_read_as_published(tmp_path, name, caplog) -> None:
    content, label, second = GLUE[name]
    examples = read(PRESETS[name], write(tmp_path / "dev.tsv", content))
    assert [e.id for e in examples] == ["0", "3" if name == "qqp" else "1"]  # as the rows of the file
    assert (examples[0].label, examples[0].b) == (label, second)
    assert examples[0].a in content
    assert ("2 rows are cut at a tab or a line end and left out" in caplog.text) == (name == "qqp")


@pytest.mark.parametrize("name", [name for name, task in PRESETS.items() if name in (*HUB_CLASSES, "stsb")])
def test_hub_columns_and_classes_are_read(tmp_path, name) -> None:
    """In Parquet with the classes' names in its metadata, and as JSON lines or CSV with their numbers."""
    columns = HUB_COLUMNS.get(name, ("sentence",) if name in ("cola", "sst2") else ("sentence1", "sentence2"))
    classes = HUB_CLASSES.get(name, ())
    labels = list(range(len(classes))) or [2.5, 0.0]
    rows = [dict.fromkeys(columns, "A text.") | {"label": label, "idx": i} for i, label in enumerate(labels)]
    features = {"label": {"_type": "ClassLabel", "names": classes}} if classes else {}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), tmp_path / "h.parquet")
    lines = write(tmp_path / "h.jsonl", "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    cells = [",".join(map(str, row.values())) for row in rows]
    table = write(tmp_path / "h.csv", "\n".join([",".join([*columns, "label", "idx"]), *cells]))
    numbered = {"mnli": ["entailment", "neutral", "contradiction"], "stsb": labels}
    want = numbered.get(name, list(PRESETS[name].labels))
    for path in (tmp_path / "h.parquet", lines, table):
        examples = read(PRESETS[name], path)
        assert [e.label for e in examples] == want and examples[0].a == "A text." == (examples[0].b or "A text.")
    bad = write(tmp_path / "bad.jsonl", json.dumps(rows[0] | {"label": -1 if classes else None}))
    with pytest.raises(ValueError, match=r"label '-1' is none of|score 'None'|is empty"):
        read(PRESETS[name], bad)


def test_sts_benchmark_has_no_header(tmp_path) -> None:
    """Tabs in a .csv, quotes and commas that are text, further columns at the end of some rows."""
    start = "main-captions\tMSRvid\t2012test\t0001\t"
    rows = [f'{start}5.000\tA plane, "big.\tAn air plane.\n', f"{start}3.8\tA man.\tA woman.\tsource\tlicence\n"]
    for content in ("".join(rows), "".join(rows[::-1])):
        examples = read(PRESETS["stsb"], write(tmp_path / "sts-train.csv", content))
        found = sorted((e.label, e.a, e.b) for e in examples)
        assert found == [(3.8, "A man.", "A woman."), (5.0, 'A plane, "big.', "An air plane.")]
    with pytest.raises(ValueError, match=r"line 2: no column 'sentence2\|6'; its columns are 0, 1, 2, 3, 4, 5"):
        read(PRESETS["stsb"], write(tmp_path / "cut.csv", f"{rows[0]}{start}3.8\tA man.\n"))


@pytest.mark.parametrize(("name", "content"), [
    ("t.csv", 'label,text\nx,"say ""hi"\ny,"b, c"\n'),
    ("t.data", 'text\tlabel\r\nsay "hi\tx\r\nb, c\ty'),
    ("u.data", '{"text": "say \\"hi", "label": "x"}\n\n{"text": "b, c", "label": "y"}'),
    ("v.data", '\ufefftext,label\nsay "hi,x\n"b, c",y\n\n'),
])  # fmt: skip
def test_same_rows_in_any_layout(tmp_path, name, content) -> None:
    for path in (write(tmp_path / name, content), write(tmp_path / f"{name}.gz", gzip.compress(content.encode()))):
        examples = read(PLAIN, path)
        assert [(e.id, e.a, e.b, e.label) for e in examples] == [("0", 'say "hi', None, "x"), ("1", "b, c", None, "y")]
        assert examples[0].where.startswith(f"{path}, line ")


def test_unicode_line_ends_are_text(tmp_path) -> None:
    odd = "one\u2028two\x85three\x0bfour"
    for name, content in {"t.tsv": f"text\tlabel\n{odd}\tx\nb\ty\n", "t.csv": f"text,label\n{odd},x\nb,y\n"}.items():
        assert read(PLAIN, write(tmp_path / name, content))[0].a == odd
    lines = read(PLAIN, write(tmp_path / "l.csv", 'text,label\n"one\ntwo",x\nb,y\n'))
    assert [(e.a, e.where.rsplit(" ", 1)[1]) for e in lines] == [("one\ntwo", "2"), ("b", "4")]


def test_unlabelled_files_need_no_labels(tmp_path) -> None:
    only = write(tmp_path / "test.tsv", "index\tsentence1\tsentence2\n0\tA.\tB.\n")
    assert read(PRESETS["rte"], only, labelled=False) == [TextExample("0", f"{only}, line 2", "A.", "B.", None)]
    assert read(PLAIN, write(tmp_path / "dev.tsv", "text\tlabel\na\t\n"), labelled=False)[0].label is None
    words = write(tmp_path / "t.conll", "one\ntwo\n\nthree\n")
    want = [(f"{words}, line 1", ("one", "two")), (f"{words}, line 4", ("three",))]
    sentences = [SentenceExample(str(i), *given, None) for i, given in enumerate(want)]
    assert read(TAG, words, labelled=False) == sentences
    asked = write(tmp_path / "t.json", json.dumps(squad({"id": "q", "question": "Who?"})))
    assert read(SQUAD2, asked, labelled=False)[0].answers is None


def test_conll_2003_file(tmp_path) -> None:
    content = (
        "-DOCSTART- -X- -X- O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\nGerman JJ I-NP I-MISC\n\n"
        "-DOCSTART- -X- O O\n\n\nPeter NNP I-NP I-PER\n"
    )
    path = write(tmp_path / "eng.train", content)
    assert read(PRESETS["conll2003"], path) == [
        SentenceExample("0", f"{path}, line 3", ("EU", "rejects", "German"), ("I-ORG", "O", "I-MISC")),
        SentenceExample("1", f"{path}, line 10", ("Peter",), ("I-PER",)),
    ]
    two = write(tmp_path / "train.txt", "-DOCSTART- O\n\nEU I-ORG\nrejects O\n")
    assert [(e.words, e.tags) for e in read(PRESETS["conll2003"], two)] == [(("EU", "rejects"), ("I-ORG", "O"))]


def test_spans_of_characters_become_tags(tmp_path, caplog) -> None:
    """Spans of several words, of scripts without spaces, and one that ends inside a word."""
    lines = [
        {"text": " Ada Lovelace (London)! ", "spans": [{"start": 1, "end": 13, "label": "PER"}, {"start": 15, "end": 21, "label": "LOC"}]},
        {"text": "東京にAda", "spans": [{"start": 0, "end": 2, "label": "LOC"}]},
        {"text": "Londoners", "spans": [{"start": 0, "end": 6, "label": "LOC"}]},
        {"text": "नई दिल्ली", "spans": []},
    ]  # fmt: skip
    path = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)))
    examples = read(TAG, path)
    assert [(e.words, e.tags) for e in examples] == [
        (("Ada", "Lovelace", "(", "London", ")", "!"), ("B-PER", "I-PER", "O", "B-LOC", "O", "O")),
        (("東", "京", "に", "Ada"), ("B-LOC", "I-LOC", "O", "O")),
        (("Londoners",), ("B-LOC",)),
        (("नई", "दिल्ली"), ("O", "O")),
    ]
    for e, line in zip(examples, lines, strict=True):
        assert e.text == line["text"] and e.words == tuple(e.text[start:end] for start, end in e.places)
    assert "1 spans begin or end inside a word" in caplog.text
    assert collect_labels(TAG, examples[2:3]) == ("B-LOC", "I-LOC", "O")
    path.write_text('{"text": "a b"}\n')
    assert read(TAG, path, labelled=False)[0].tags is None
    for bad, message in {
        '[{"start": 0, "end": 4, "label": "X"}]': "is not a span", '[{"start": 1, "end": 2, "label": "X"}]': "is not a span",
        '[{"start": 0, "end": 1}]': "is not a span", "{}": "is not a span",
        '[{"start": 0, "end": 1, "label": "X", "label": "Y"}]': '"there twice"} is not a span',
        '[{"start": 0, "end": 3, "label": "X"}, {"start": 2, "end": 3, "label": "Y"}]': "two spans share the word 'b'",
    }.items():  # fmt: skip
        path.write_text('{"text": "a b", "spans": %s}' % bad)  # noqa: UP031
        with pytest.raises(ValueError, match=rf"t\.jsonl, line 1: .*{message}"):
            read(TAG, path)


def test_tags_with_tabs_crlf_and_control_characters(tmp_path) -> None:
    """What parts the sentences may hold a tab or a blank; a word may hold a blank or be but a control character."""
    path = write(tmp_path / "w.conll", "New York\tS-place\r\n\x1f\tO\r\n\r\n\xa0\tB-x\nc\tE-x\n \t\n\t\nd\tO")
    assert [(e.words, e.tags) for e in read(TAG, path)] == [
        (("New York", "\x1f"), ("S-place", "O")),
        (("\xa0", "c"), ("B-x", "E-x")),
        (("d",), ("O",)),
    ]
    spaces = write(tmp_path / "p.conll", "dogs  NOUN\nbark  VERB\n")
    assert read(custom("tag", metrics=["accuracy"]), spaces)[0].tags == ("NOUN", "VERB")


def test_squad_file(tmp_path) -> None:
    no_answer = qa("q2", is_impossible=True, plausible_answers=[{"text": "Rome", "answer_start": 15}])
    path = write(tmp_path / "dev.json", json.dumps(squad(qa("q1", ("Ada", 0), ("Ada met", 0)), no_answer)))
    first, second = read(SQUAD2, path)
    where = f"{path}, data[0].paragraphs[0], question q1"
    assert first == QuestionExample("q1", where, "Who?", "Ada met Bob in Rome.", (("Ada", 0), ("Ada met", 0)))
    assert second.answers == ()
    with pytest.raises(ValueError, match=r"question q2: has no answer, which squad1\.1 does not allow"):
        read(SQUAD, path)


def test_cells_of_other_types_are_named(tmp_path) -> None:
    table = pa.table({"text": ["a", "b"], "label": [Decimal("1.5"), Decimal("2.5")]})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"column 'label' holds \"Decimal\('1\.5'\)\", which is neither text nor"):
        read(PLAIN, tmp_path / "x.parquet")


BAD = {
    "empty file": ("", PLAIN, "bad: holds no example"),
    "missing column": ("sentence\tclass\na\tb\n", PLAIN, "line 2: no column 'text'; its columns are sentence, class"),
    "missing key": ('{"text": "a", "label": "x"}\n{"text": "b"}', PLAIN, "line 2: no column 'label'; its columns are text"),
    "empty text": ("text\tlabel\na\tx\n \u3000\ty\n", PLAIN, "line 3: column 'text' is empty"),
    "number for text": ('{"text": 5, "label": "x"}', PLAIN, "line 1: column 'text' holds no text but 5"),
    "list for label": ('{"text": "a", "label": ["x"]}', PLAIN, "line 1: column 'label' holds [\"x\"], which is neither"),
    "too few columns": ("text\tlabel\na\tx\nb\n", PLAIN, "line 3: has 1 columns, the header has 2"),
    "ragged": ("s\t1\t\ta\ns\t1\ta\n", BY_NUMBER, "line 2: has 3 columns, the first line has 4"),
    "unknown label": ("sentence\tlabel\na\t0\nb\t2\n", PRESETS["sst2"], "line 3: label '2' is none of 0, 1"),
    "NaN": ("a\tb\ty\n1\t2\t0.5\n1\t2\tnan\n", SCORE, "line 3: score 'nan' in column 'y' is not a finite number"),
    "huge": ('{"a": "x", "b": "y", "y": 1' + "0" * 400 + "}", SCORE, "line 1: score '1000"),
    "underscore": ("a\tb\ty\n1\t2\t1_0\n", SCORE, "line 2: score '1_0' in column 'y' is not a finite number"),
    "true": ('{"a": "x", "b": "y", "y": true}', SCORE, "line 1: score 'True'"),
    "duplicate id": ("key\ta\tb\ty\n7\t1\t2\tx\n8\t1\t2\tx\n7\t1\t2\tx\n", PAIR, "line 4: id '7' was used before, at "),
    "not UTF-8": (b"text\tlabel\na\tx\ncaf\xe9\ty\n", PLAIN, "line 3: is not UTF-8; convert"),
    "not JSON": ('{"text": "a", "label": "x"}\n{"text": ', PLAIN, "line 2: is not JSON"),
    "list.json": ('[\n{"text": "a", "label": "x"}\n]', PLAIN, "line 1: is not a JSON object; a file has one on each line"),
    "deep": ('{"text": ' + "[" * 100_000, PLAIN, "line 1: is not JSON"),
    "half a character": (r'{"text": "a \ud83d b", "label": "x"}', PLAIN, "line 1: is not JSON ('utf-8' codec can't encode character"),
    "tag without word": ("a\tO\n\tB-x\n", TAG, "line 2: the word in column 0 is empty"),
    "one column": ("O\nB-x\n", TAG, "line 1: has one column, 'O'; a word and its tag are needed"),
    "too few for conll": ("a\tO\n", custom("tag", ["0"], "3"), "line 1: has 2 columns, but the tag is in column 3"),
    "no entity tag": ("a NOUN\n", TAG, "line 1: tag 'NOUN' is neither O nor B-, I-, E- or S- and a name"),
    "unknown tag": ("a O\nb B-y\n", replace(TAG, labels=("O", "B-x")), "line 2: label 'B-y' is none of O, B-x"),
    "no sentence": ("-DOCSTART- O\n\n", TAG, "bad: holds no example"),
    "outside": (squad(qa("q1", ("Rome.", 17))), SQUAD2, "answer 'Rome.' is not at 17 of its context, which has 'me.'"),
    "before": (squad(qa("q1", ("Ada", -20))), SQUAD2, "question q1: answer 'Ada' is not at -20 of its context"),
    "empty answer": (squad(qa("q1", ("", 3))), SQUAD2, "question q1: an answer is empty"),
    "no answer": (squad(qa("q1")), SQUAD2, "question q1: has 0 answers, is_impossible=False"),
    "impossible": (squad(qa("q1", ("Ada", 0), is_impossible=True)), SQUAD2, "q1: has 1 answers, is_impossible=True"),
    "twice": (squad(qa("q1", ("Ada", 0)), qa("q1", ("Bob", 8))), SQUAD2, "question q1: id 'q1' was used before"),
    "empty context": (squad(qa("q1", ("Ada", 0)), context="\n"), SQUAD2, "q1: the question or its context is empty"),
    "text for start": (squad(qa("q1", ("Ada", "0"))), SQUAD2, "question q1: has no 'answer_start' that is a number"),
    "no data": ({"version": "1"}, SQUAD2, "bad: has no 'data' that is a list, as SQuAD's JSON has"),
    "no questions": (squad(), SQUAD2, "bad: holds no example"),
    ".csv": ('text,label\na,x\n"b"c,y\n', PLAIN, "line 3: is not CSV"),
    ".tsv.gz": ("text\tlabel\na\tx\n", PLAIN, ": is not a whole gzip file"),
    "damaged.gz": (ZIPPED[:20] + b"\xff" * 8 + ZIPPED[28:], PLAIN, ": is not a whole gzip file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_mistake_in_a_file_is_one_line(tmp_path, case) -> None:
    content, task, message = BAD[case]
    ending = case[case.index(".") :] if "." in case else ""
    path = write(tmp_path / f"bad{ending}", json.dumps(content) if task is SQUAD2 else content)
    with pytest.raises(ValueError) as caught:
        read(task, path)
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_ranking_is_pairs_of_a_query(tmp_path, caplog) -> None:
    """A text that is the query, or one of the positives, is not a negative."""
    chosen, scored = {"positives": ["p"], "negatives": ["n", "q", "p"]}, {"texts": ["a", "b"], "scores": [2, 0.5]}
    lines = (json.dumps({"query": query} | texts) for query, texts in (("q", chosen), ("r", scored)))
    path = write(tmp_path / "r.jsonl", "\n".join(lines))
    want = [("0", "q", "p", 1.0), ("1", "q", "n", 0.0), ("2", "r", "a", 2.0), ("3", "r", "b", 0.5)]
    assert [(e.id, e.a, e.b, e.label) for e in read(PRESETS["ranking"], path)] == want
    assert [e.b for e in read(PRESETS["ranking"], path, labelled=False)] == ["p", "n", "a", "b"]
    same = f"{path}: 2 negatives are the query or one of its positives, and left out"
    assert caplog.messages == [same, same]
    bare = write(tmp_path / "bare.jsonl", '{"query": "q", "texts": ["a"]}\n{"query": "q", "positives": ["p", "p"]}')
    assert [e.b for e in read(PRESETS["ranking"], bare, labelled=False)] == ["a", "p", "p"]
    for bad in (
        {"texts": ["a"], "scores": [1, 2]}, {"texts": ["a"], "scores": [None]},
        {"texts": ["a"], "scores": [10**400]}, {"texts": [""], "scores": [1]},
        {"positives": ["a"], "negatives": []}, {"texts": [], "scores": []},
    ):  # fmt: skip
        path.write_text(json.dumps({"query": "q"} | bad))
        with pytest.raises(ValueError, match=r"r\.jsonl, line 1: (has \d scores of 1 texts|is not a query)"):
            read(PRESETS["ranking"], path)
    path.write_text(json.dumps({"query": "q", "texts": ["a", "b"], "scores": [1, -1]}))
    with pytest.raises(ValueError, match=r"r\.jsonl, line 1: score -1\.0: ndcg and mrr take"):
        read(PRESETS["ranking"], path)
    with pytest.raises(ValueError, match=r"line 1: --id key: a list of texts has no ids"):
        keyed = write(tmp_path / "k.jsonl", json.dumps({"query": "q", "key": 1} | scored))
        read(replace(PRESETS["ranking"], id="key"), keyed)


def test_labels_of_json_and_label_sets(tmp_path) -> None:
    path = write(tmp_path / "t.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": true}')
    assert [e.label for e in read(PLAIN, path)] == ["1", "true"]
    path = write(tmp_path / "f.jsonl", "".join(f'{{"text": "a", "label": {n}}}\n' for n in (1.0, 0.5, -2.0, 1e300)))
    assert [e.label for e in read(PLAIN, path)] == ["1", "0.5", "-2", "1e+300"], "1.0 is the number 1"
    path = write(tmp_path / "s.jsonl", '{"a": "x", "b": "y", "y": 2}\n{"a": "x", "b": "y", "y": "-1e-1"}')
    assert [e.label for e in read(SCORE, path)] == [2.0, -0.1]
    path = write(tmp_path / "blank.csv", "text,label\na, pos\nb,pos\n")
    assert [e.label for e in read(PLAIN, path)] == ["pos", "pos"]
    task = custom("multilabel", ["t"], "y")
    table = write(tmp_path / "a.tsv", "t\ty\nx\tb, a\ny\t\nz\tc\n")
    lines = write(tmp_path / "a.jsonl", '{"t": "x", "y": ["b", "a"]}\n{"t": "y", "y": []}\n{"t": "z", "y": "c"}\n')
    parquet.write_table(pa.table({"t": ["x", "y", "z"], "y": [["b", "a"], [], ["c"]]}), tmp_path / "a.parquet")
    for path in (table, lines, tmp_path / "a.parquet"):
        assert [e.label for e in read(task, path)] == [("b", "a"), (), ("c",)]
    for label, message in (
        (["a, b"], "label 'a, b' holds a comma"),
        (["a\tb"], "column 'y' holds 'a\\\\tb', with a tab"),
        ("['a', 'b']", "is a list as text; write a,b"),
        ("[1, 0, 1]", "'\\[1, 0, 1\\]' is a list as text; write a,b"),
        (" [1. 0.] ", "is a list as text; write a,b"),
        ("[a, b]", "is a list as text; write a,b"),
        (
            [1, 0, 0],
            "label '0' twice in column 'y': a list holds names of labels, each once, not 0 and 1 for each label",
        ),
        ("1,0,0", "label '0' twice in column 'y': a list"),
        ([float("nan")], "column 'y' holds nan; fill it"),
    ):
        path = write(tmp_path / "odd.jsonl", json.dumps({"t": "x", "y": label}))
        with pytest.raises(ValueError, match=message):
            read(task, path)
    bracketed = write(tmp_path / "bracketed.tsv", "t\ty\nx\t[URL],[b]\n")
    assert [e.label for e in read(task, bracketed)] == [("[URL]", "[b]")]
    with pytest.raises(ValueError, match=r"line 2: label 'b' is none of a, c"):
        read(custom("multilabel", ["t"], "y", labels=["a", "c"]), table)
    # the label is any column where it is not read, as in a prediction
    with pytest.raises(ValueError, match=r"line 3: column 't' is empty"):
        read(custom("multilabel", ["t"], "t"), write(tmp_path / "empty.tsv", "t\nx\n \n"), labelled=False)


@pytest.mark.parametrize(("changes", "message"), [
    ({"text": ("0",)}, "all columns by name or all by number"),
    ({"labels": ("x", "y", "x")}, "not distinct"),
    ({"kind": "score", "labels": ("1", "2")}, "has no labels"),
    ({"kind": "tag", "label": "-1"}, "columns of words and tags are numbers"),
    ({"kind": "tag", "text": ("0",), "label": "1", "id": "2"}, "have no id"),
    ({"kind": "tag", "text": ("0", "1"), "label": "2"}, "one text column"),
    ({"kind": "span"}, "no columns to name"),
])  # fmt: skip
def test_contradictory_task_is_refused(changes, message) -> None:
    with pytest.raises(ValueError) as caught:
        replace(Task("mine", "classify", ("a",), "y"), **{"metrics": ()} | changes)
    assert message in str(caught.value) and "\n" not in str(caught.value) and "task mine" in str(caught.value)

"""The page shows the figures of the report, bars in proportion, and text from the corpus as text."""

import re

from data_prep.report.html_report import render

FACTS = {
    "corpora": {"wiki": {"weight": 1.0, "documents": 1234, "sentences": 9, "tokens": 99, "bytes": 999}},
    "dropped": {"reasons": {"exact duplicate": 7}, "repeated_paragraphs": 3},
    "examples": {"exact duplicate": ["<script>alert(1)</script> & more"]},
    "problems": {"invalid UTF-8": 2},
    "cleaned": {"nuls": 1},
    "histograms": {"tokens of a document": {1: 4, 2: 10, 3: 10, 64: 5, 100: 5}},
    "datasets": {"24": {"rows": 5, "held_out": {"rows": 0}, "lengths": {1: 8, 24: 4}}},
}


def bars(text):
    """(label, count, pixels) of each bar."""
    found = re.findall(r'class="n">([^<]*)</td><td class="n">([\d,]+)</td><td><span[^>]*width:(\d+)px', text)
    return [(label, int(count.replace(",", "")), int(width)) for label, count, width in found]


def test_figures_bars_and_escaped_examples():
    text = render(FACTS)
    assert "1,234" in text and "invalid UTF-8" in text
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert bars(text) == [
        ("1", 4, 60), ("2 – 3", 20, 300), ("64 – 127", 10, 150), ("1 – 2", 8, 300), ("23 – 24", 4, 150),
    ]  # fmt: skip


def test_a_build_that_kept_nothing_of_a_kind_has_a_page():
    empty = FACTS | {"histograms": {"tokens of a sentence": {}}, "examples": {}, "problems": {}}
    assert bars(render(empty)) == [("1 – 2", 8, 300), ("23 – 24", 4, 150)]

"""Scores equal their published rules, worked by hand or counted by an oracle."""

import json
import math

import numpy as np
import pytest

from megabert.common.errors import BadTraining
from megabert.finetune.encoding import TaskItem
from megabert.finetune.files import QuestionExample, SentenceExample, TextExample, read
from megabert.finetune.scores import best_threshold, by_label, decode, normalized, overlap, score, write
from megabert.finetune.tasks import METRICS, PRESETS, custom

CLASSES = custom("classify", ["text"], "label", ["accuracy", "f1", "macro_f1", "matthews"])
SCORE = custom("score", ["text"], "label", ["pearson", "spearman"])
TAG = custom("tag", metrics=METRICS["tag"])
SQUAD, SQUAD2 = PRESETS["squad1.1"], PRESETS["squad2.0"]
CONTEXT = "Ada  met Bob in Rome."
SPANS = [(0, 3), (5, 8), (9, 12), (13, 15), (16, 20), (20, 21)]


def texts(labels) -> list[TextExample]:
    return [TextExample(str(i), f"t.tsv, line {i + 2}", "a", None, label) for i, label in enumerate(labels)]


def sentences(tags) -> list[SentenceExample]:
    return [SentenceExample(str(i), f"line {i}", ("w",) * len(t), tuple(t)) for i, t in enumerate(tags)]


def questions(answers) -> list[QuestionExample]:
    return [QuestionExample(f"q{i}", "", "Who?", "c", tuple((a, 0) for a in of)) for i, of in enumerate(answers)]


def predicted(text: str, probability: float = 0.0) -> dict:
    return {"text": text, "no_answer_probability": probability}


def test_metrics_of_labels_by_hand() -> None:
    truth, found = "1111100000", "1100000000"  # 2 true positives, 3 misses
    one, zero = 2 * 2 / (5 + 2), 2 * 5 / (5 + 8)
    want = {"accuracy": 0.7, "f1": one, "macro_f1": (one + zero) / 2, "matthews": 0.5}
    figures = score(CLASSES, texts(truth), list(found), ("0", "1"))
    assert figures == pytest.approx(want) and list(figures) == list(want)
    assert score(CLASSES, texts(truth), list(found), ("1", "0"))["f1"] == pytest.approx(zero)
    constant = score(CLASSES, texts("1100"), list("0000"), ("0", "1"))
    assert constant == pytest.approx({"accuracy": 0.5, "f1": 0.0, "macro_f1": 1 / 3, "matthews": 0.0})
    with pytest.raises(ValueError, match=r"t\.tsv, line 2: has no label to score against"):
        score(CLASSES, texts([None]), ["1"], ("0", "1"))
    sets = custom("multilabel", ["t"], "y", ["micro_f1", "macro_f1", "accuracy"])
    # a: 2 true positives; b: 1 false positive, 2 misses
    figures = score(sets, texts([("a",), ("a", "b"), (), ("b",)]), [["a"], ["a"], ["b"], []], ("a", "b"))
    assert figures == {"micro_f1": pytest.approx(2 * 2 / (2 * 2 + 1 + 2)), "macro_f1": 0.5, "accuracy": 0.25}


def test_correlations_and_entities_by_hand() -> None:
    figures = score(SCORE, texts([1.0, 2.0, 2.0, 3.0, 5.0]), [0.0, 4.0, 4.0, 4.0, 3.0])
    # values less their means; ranks 1 2.5 2.5 4 5 against 1 4 4 4 2
    assert figures == pytest.approx({"pearson": 4.0 / math.sqrt(9.2 * 12), "spearman": 2 / math.sqrt(9.5 * 8)})
    for truth, found in (([1.0, 2.0, 3.0], [2.0] * 3), ([2.0] * 3, [1.0, 2.0, 3.0]), ([1.0], [1.0])):
        assert score(SCORE, texts(truth), found) == {"pearson": 0.0, "spearman": 0.0}
    # as conlleval counts: an I- may begin an entity, another type begins another one; both ends and the type must be correct
    truth, found = [["I-A", "I-A", "I-B", "O"], ["B-A", "O"]], [["B-A", "I-A", "I-B", "I-B"], ["O", "O"]]
    want = {"f1": 2 / 5, "precision": 1 / 2, "recall": 1 / 3, "accuracy": 3 / 6}
    assert score(TAG, sentences(truth), found) == pytest.approx(want)
    none = {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}
    assert score(TAG, sentences([["O", "O"]]), [["O", "O"]]) == none


def two(*odds: float) -> list[np.ndarray]:
    """Logits of two labels with these log odds of the last one."""
    return [np.array([1.0, 1.0 + value], np.float32) for value in odds]


def test_area_threshold_and_errors_equal_oracles() -> None:
    binary = custom("classify", ["text"], "label", ["auroc"])
    draw = np.random.default_rng(1)
    truth = ["no" if value else "yes" for value in draw.random(200) < 0.8]
    odds = np.round(draw.normal(size=200) + 0.7 * (np.array(truth) == "yes") - 2, 1)  # with ties
    labels, given = ("no", "yes"), two(*odds)
    figures = score(binary, texts(truth), truth, labels, given)
    # the share of pairs of a yes and a no that are in order, ties one half (Mann and Whitney 1947)
    ours, theirs = (odds[np.array(truth) == label] for label in ("yes", "no"))
    pairs = np.sign(ours[:, None] - theirs[None, :])
    assert figures == pytest.approx({"auroc": float((pairs + 1).mean() / 2)}) and 0.5 < figures["auroc"] < 0.9
    assert score(binary, texts(["no"] * 2), ["no"] * 2, labels, two(1, 2)) == {"auroc": 0.0}
    f1 = custom("classify", ["text"], "label", ["f1"])

    def f1_at(threshold: float) -> float:
        decided = decode(f1, texts(truth), [item(i) for i in range(200)], given, labels, threshold)
        return score(f1, texts(truth), decided, labels)["f1"]

    chosen = best_threshold(truth, given, labels)
    assert f1_at(chosen) == max(f1_at(1 / (1 + math.exp(-value))) for value in np.arange(-6, 4, 0.05))
    assert f1_at(chosen) > f1_at(0.5) + 0.1
    assert best_threshold(["no"] * 2, two(1, 2), labels) == 0.5
    error = custom("score", ["text"], "label", ["mae"])
    assert score(error, texts([1.0, -2.0]), [1.5, 0.0]) == {"mae": 1.25}


def test_thresholds_of_confident_models_are_finite() -> None:
    truth, labels = ["yes", "no", "yes"], ("no", "yes")
    for odds, limit, found in (((60, 40, 58), 30, "yes"), ((-1500, -1600, -1400), -30, "no")):
        chosen = best_threshold(truth, two(*odds), labels)
        assert math.log(chosen / (1 - chosen)) == pytest.approx(limit, rel=1e-4)
        items = [item(i) for i in range(3)]
        assert decode(CLASSES, texts(truth), items, two(*odds), labels, chosen) == [found] * 3


def test_rankings_by_hand() -> None:
    """Ties count against the reciprocal rank, and are averaged in nDCG; a query without a choice counts in neither."""
    task = custom("score", ["a", "b"], "y", ["mrr", "ndcg"])
    rows = [("q", 0.0, 0.9), ("q", 2.0, 0.5), ("q", 1.0, 0.1), ("tie", 1.0, 0.0), ("tie", 0.0, 0.0), ("one", 1.0, 5.0),
            ("none", 0.0, 1.0), ("none", 0.0, 2.0)]  # fmt: skip
    examples = [TextExample("0", "", query, "t", truth) for query, truth, _ in rows]
    first = (2 / math.log2(3) + 1 / 2) / (2 + 1 / math.log2(3))
    tie = (1 + 1 / math.log2(3)) / 2
    want = {"mrr": (1 / 2 + 1 / 2) / 2, "ndcg": (first + tie) / 2}
    assert score(task, examples, [found for *_, found in rows]) == pytest.approx(want)


def test_report_by_label_by_hand() -> None:
    truth, found = ["a", "a", "b", "c"], ["a", "b", "b", "b"]
    want = [("a", 1.0, 1 / 2, 2 / 3, 2), ("b", 1 / 3, 1.0, 1 / 2, 1), ("c", 0.0, 0.0, 0.0, 1)]
    assert by_label(CLASSES, texts(truth), found, "abc") == [pytest.approx(row) for row in want]
    sets = custom("multilabel", ["t"], "y")
    rows = by_label(sets, texts([("a", "b"), ("b",), ()]), [["a"], ["b"], ["a"]], "ab")
    assert rows == [pytest.approx(row) for row in (("a", 1 / 2, 1.0, 2 / 3, 1), ("b", 1.0, 1 / 2, 2 / 3, 2))]
    tags = sentences([["B-X", "I-X", "O", "B-Y"], ["O"]])
    entities = by_label(TAG, tags, [["B-X", "O", "O", "B-Y"], ["B-Y"]], ())
    assert entities == [pytest.approx(row) for row in (("X", 0.0, 0.0, 0.0, 1), ("Y", 1 / 2, 1.0, 2 / 3, 1))]
    assert by_label(TAG, sentences([["O"]]), [["O"]], ()) == by_label(SCORE, texts([1.0]), [1.0], ()) == []
    words = by_label(custom("tag", metrics=["accuracy"]), sentences([["N", "V"]]), [["N", "N"]], ("N", "V"))
    assert words == [pytest.approx(("N", 1 / 2, 1.0, 2 / 3, 1)), ("V", 0.0, 0.0, 0.0, 1)]


def test_squads_rules_by_hand() -> None:
    for text, want in {
        "The  Café, an\tOld-Time bar!": "café oldtime bar",
        "a.b the-end": "ab theend",  # punctuation goes before articles are looked for
        "U.S.A.": "usa",
        "an “answer”": "“answer”",  # ASCII punctuation alone
        "theatre another A": "theatre another",
    }.items():
        assert normalized(text) == want, text
    assert overlap("the cat sat", "a cat sat down", False) == pytest.approx(2 * (2 / 2) * (2 / 3) / (1 + 2 / 3))
    assert overlap("no no no", "no no", False) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    for one, other, by_1, by_2 in (("cat", "dog", 0, 0), ("", "", 0, 1), ("the", "!", 0, 1), ("", "cat", 0, 0)):
        assert (overlap(one, other, False), overlap(one, other, True)) == (by_1, by_2), (one, other)
    # the best of several answers
    asked = questions([["Denver Broncos", "The Broncos"], ["1999"], ["a cat", "the"]])
    figures = score(SQUAD, asked, [predicted("broncos"), predicted("in 1999"), predicted("")])
    # 1 and 1; 0 and 2/3; the third equals "the" once normalised, but shares no word with it
    assert figures == pytest.approx({"f1": (1 + 2 / 3 + 0) / 3, "em": 2 / 3})
    asked = questions([[], [], ["the"], ["Rome", "the"], ["Rome"]])
    given = [predicted(""), predicted("Rome"), predicted(""), predicted(""), predicted("")]
    # correct; wrong; its answer is empty once normalised, so none is correct; "the" is dropped; wrong
    assert score(SQUAD2, asked, given) == {"em": 2 / 5, "f1": 2 / 5}


def item(example: int, tokens: int = 1, spans: list[tuple[int, int]] | None = None) -> TaskItem:
    char_spans = np.array([(0, 0), *(spans or [])], np.int64)
    positions = np.arange(len(char_spans) if spans else tokens)
    return TaskItem(example, np.zeros(9, np.int32), 9, positions, np.zeros(0, np.int64), char_spans)


def test_texts_and_tags_are_decided_by_their_logits() -> None:
    items, logits = [item(0), item(1)], [np.array(v, np.float32) for v in ([0, 1, 0], [5, 0, 2])]
    assert decode(CLASSES, texts("ab"), items, logits, "xyz") == ["y", "x"]
    several = custom("multilabel", ["t"], "y")
    assert decode(several, texts("ab"), items, logits, "xyz") == [["y"], ["x", "z"]]
    assert decode(SCORE, texts([0.0] * 2), items, [v[:1] for v in logits], ()) == [0.0, 5.0]
    with pytest.raises(BadTraining, match=r"t\.tsv, line 3: the model's output is not finite"):
        decode(CLASSES, texts("ab"), items, [logits[0], logits[1] * np.nan], "xyz")
    # tags of windows are joined
    items = [item(0, 2), item(0, 1), item(1, 2)]
    logits = [np.eye(3)[[1, 0]], np.eye(3)[[2]], np.eye(3)[[0, 1]]]
    found = decode(TAG, sentences([["O"] * 3, ["O"] * 2]), items, logits, ("O", "B-A", "I-A"))
    assert found == [["B-A", "O", "I-A"], ["O", "B-A"]]


def span_logits(null: float = 0.0, **values: tuple[float, float]) -> np.ndarray:
    """[7, 2]; `t3=(1, 2)` gives token 3 the start logit 1 and the end logit 2."""
    logits = np.full((7, 2), -5.0, np.float32)
    logits[0] = null / 2
    for name, pair in values.items():
        logits[int(name[1:])] = pair
    return logits


def answer(task, *logits: np.ndarray, context: str = CONTEXT, spans: list[tuple[int, int]] | None = SPANS) -> dict:
    asked = [QuestionExample("q", "question q", "Who?", context, None)]
    (found,) = decode(task, asked, [item(0, spans=spans) for _ in logits], list(logits), ())
    return found


def test_answer_is_a_slice_neither_long_nor_blank() -> None:
    assert answer(SQUAD, span_logits(t1=(3, 0), t2=(0, 3)))["text"] == "Ada  met"
    # an end before its start is not an answer
    assert answer(SQUAD, span_logits(t5=(3, -5), t1=(-4, 9)))["text"] == "Ada"
    assert answer(SQUAD, span_logits(t1=(3, 3), t5=(2, 2)))["text"] == "Ada"
    context, logits = " ".join("w" * 60), np.zeros((61, 2))
    logits[1, 0] = logits[31, 1] = 9  # 31 tokens
    logits[30, 1] = 8  # 30 tokens
    spans = [(2 * i, 2 * i + 1) for i in range(60)]
    assert answer(SQUAD, logits, context=context, spans=spans)["text"] == context[:59]
    none = answer(SQUAD, np.zeros((1, 2)), context=" \u200b ", spans=None)
    assert none == {"text": "", "no_answer_probability": 1.0}
    blank = np.array([[0, 0], [0, 0], [9, 9], [0, 1]])
    assert answer(SQUAD, blank, context="a  b", spans=[(0, 1), (3, 3), (3, 4)])["text"] == "b"


def test_no_answer_wins_where_allowed() -> None:
    logits = span_logits(null=8, t3=(3, 3))
    assert answer(SQUAD, logits)["text"] == "Bob"
    assert answer(SQUAD2, logits) == {"text": "", "no_answer_probability": pytest.approx(1 / (1 + math.exp(-2)))}
    assert answer(SQUAD2, span_logits(null=6, t3=(3, 3)))["text"] == "Bob"  # a tie
    assert answer(SQUAD2, span_logits(null=2000, t3=(3, 3)))["no_answer_probability"] == 1.0
    sure, unsure = span_logits(null=1, t5=(4, 4)), span_logits(null=9, t1=(2, 2))
    for windows in ((sure, unsure), (unsure, sure)):
        want = {"text": "Rome", "no_answer_probability": pytest.approx(1 / (1 + math.exp(7)))}
        assert answer(SQUAD2, *windows) == want


def test_predictions_file_of_each_kind(tmp_path) -> None:
    path = tmp_path / "new" / "p.tsv"
    assert write(CLASSES, [(texts("xyz")[:2], ["x", "y"]), (texts("xyz")[2:], ["z"])], path) == 3
    assert path.read_text() == "index\tprediction\n0\tx\n1\ty\n2\tz\n"
    write(SCORE, [(texts([1.0]), [0.1])], path)
    assert path.read_text() == "index\tprediction\n0\t0.1\n"
    named = [SentenceExample("0", "", ("Hà Nội", "đẹp"), ("B-A", "O")), SentenceExample("1", "", ("x",), ("O",))]
    write(TAG, [(named[:1], [["B-A", "I-A"]]), (named[1:], [["O"]])], path)
    assert path.read_text() == "Hà Nội\tB-A\tB-A\nđẹp\tO\tI-A\n\nx O O\n"
    assert [s.words for s in read(TAG, path)] == [s.words for s in named]
    write(TAG, [([SentenceExample("0", "", ("Ada",), None)], [["B-A"]])], path)
    assert path.read_text() == "Ada B-A\n"
    asked = questions([["a"], []])
    write(SQUAD2, [(asked, [predicted("Café", 0.25), predicted("", 0.75)])], tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text()) == {"q0": "Café", "q1": ""}
    assert json.loads((tmp_path / "p.no_answer.json").read_text()) == {"q0": 0.25, "q1": 0.75}
    write(SQUAD, [(asked[:1], [predicted("a")])], tmp_path / "one.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "one.json", "p.json", "p.no_answer.json"]

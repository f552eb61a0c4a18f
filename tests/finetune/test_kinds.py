"""Several labels, ordered labels, choices and ranked pairs: read, learned by the right loss, judged and predicted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from torch.nn import functional as F

from megabert import hf as pretrained
from megabert.distributed.process_group import discover
from megabert.finetune import class_weights, datasets, encoding, heads, metrics, prediction, save, scores, tasks
from megabert.finetune.__main__ import parse, settings_of
from megabert.finetune.batches import Layout, collate
from megabert.finetune.encoding import NO_SPANS, Item
from megabert.finetune.heads import Shape
from megabert.finetune.tasks import Task
from tests.helpers import finetune_items, finetune_problem, finetuned

CPU = torch.device("cpu")
SWAG = (
    ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    '0,v,1,"w1 w2. She",w1 w2.,She,gold,"w3, w4",w5,w6 w7,w8,2\n'
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ---- files


def test_several_labels_are_commas_or_a_list_and_may_be_none(tmp_path: Path) -> None:
    task = tasks.custom("multilabel", ["t"], "y")
    table = write(tmp_path / "a.tsv", "t\ty\nx\tb, a\ny\t\nz\tc\n")
    lines = write(tmp_path / "a.jsonl", '{"t": "x", "y": ["b", "a"]}\n{"t": "y", "y": []}\n{"t": "z", "y": "c"}\n')
    parquet.write_table(pa.table({"t": ["x", "y", "z"], "y": [["b", "a"], [], ["c"]]}), tmp_path / "a.parquet")
    for path in (table, lines, tmp_path / "a.parquet"):
        examples = datasets.read(task, path)
        assert [e.label for e in examples] == [("b", "a"), (), ("c",)]
        assert encoding.labels_of(task, examples) == ("a", "b", "c")
    with pytest.raises(ValueError, match=r"line 2: label 'b' is none of a, c"):
        datasets.read(tasks.custom("multilabel", ["t"], "y", labels=["a", "c"]), table)


def test_swags_file_is_read_as_its_authors_wrote_it(tmp_path: Path) -> None:
    task, path = tasks.preset("swag"), write(tmp_path / "train.csv", SWAG)
    (example,) = datasets.read(task, path)
    assert (example.a, example.label) == ("w1 w2.", "2")
    assert example.options == ("She w3, w4", "She w5", "She w6 w7", "She w8")
    assert encoding.labels_of(task, [example]) == ("0", "1", "2", "3")
    finetune_problem.write_run(tmp_path / "run")
    tokenizer = pretrained.load(tmp_path / "run").tokenizer
    (item,) = encoding.encode(task, [example], tokenizer, ("0", "1", "2", "3"), 32)
    ends = [tokenizer.tokens[ids[-2]].strip() for ids, _ in item.sequences]
    assert ends == ["w4", "w5", "w7", "w8"] and item.targets.tolist() == [2]
    write(path, SWAG.replace(",2\n", ",4\n"))
    with pytest.raises(ValueError, match=r"train\.csv, line 2: label '4' is none of 0, 1, 2, 3"):
        datasets.read(task, path)


def test_choices_and_pairs_become_one_item_of_several_sequences(tmp_path: Path) -> None:
    finetune_problem.write_run(tmp_path / "run")
    tokenizer = pretrained.load(tmp_path / "run").tokenizer
    path = write(tmp_path / "t.tsv", "q\tgood\tbad\tother\nw1 w2\tw3\tw4 w5\tw6\n")
    task = tasks.custom("rank", ["q"], choices=["good", "bad"])
    (example,) = datasets.read(task, path)
    (item,) = encoding.encode(task, [example], tokenizer, (), 8)
    shown = [[tokenizer.tokens[i].strip() for i in ids] for ids, _ in item.sequences]
    assert shown == [["[CLS]", "w1", "w2", "[SEP]", "w3", "[SEP]"], ["[CLS]", "w1", "w2", "[SEP]", "w4", "w5", "[SEP]"]]
    assert item.targets.tolist() == [0] and [second for _, second in item.sequences] == [4, 4]
    assert item.tokens == 13 and item.positions.tolist() == [0, 0]
    batch = collate([item, item], Layout("rank", 8))
    assert batch.places is not None and batch.places.tolist() == [[0, 1], [2, 3]]
    assert batch.packed.input_ids.flatten()[batch.read].tolist() == [tokenizer.cls_id] * 4
    last = collate([item], Layout("rank", 8, causal=True))
    assert last.packed.input_ids.flatten()[last.read].tolist() == [tokenizer.sep_id] * 2
    with pytest.raises(ValueError, match="learns from two texts a line, the better one first; 1 are named"):
        datasets.read(tasks.custom("rank", ["q"], choices=["good"]), path)
    wider = datasets.for_prediction(task, path, choices=["good", "bad", "other"])
    (unlabelled,) = datasets.read(wider, path, labelled=False)
    assert unlabelled.options == ("w3", "w4 w5", "w6") and unlabelled.label is None


def test_the_order_of_ordinal_labels_is_that_of_numbers_or_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tsv", "t\ty\na\t10\nb\t9\nc\t2\n")
    task = tasks.custom("ordinal", ["t"], "y")
    assert encoding.labels_of(task, datasets.read(task, path)) == ("2", "9", "10")
    write(path, "t\ty\na\tlow\nb\thigh\n")
    with pytest.raises(ValueError, match="high, low are no numbers; name them in their order with --labels"):
        encoding.labels_of(task, datasets.read(task, path))


def test_words_and_questions_come_from_tables_of_lists_too(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"tokens": [["a", "b"], ["c"]], "tags": [["O", "B-X"], ["O"]]}), path)
    task = tasks.custom("tag", ["tokens"], "tags")
    assert [(e.words, e.tags) for e in datasets.read(task, path)] == [(("a", "b"), ("O", "B-X")), (("c",), ("O",))]
    parquet.write_table(pa.table({"tokens": [["a", "b"]], "tags": [["O"]]}), path)
    with pytest.raises(ValueError, match="row 0: has 2 words and 1 tags"):
        datasets.read(task, path)
    with pytest.raises(ValueError, match="name its columns of words and tags"):
        datasets.read(tasks.preset("conll2003"), path)
    answers = [{"text": ["b"], "answer_start": [2]}, {"text": [], "answer_start": []}]
    rows = {"id": ["1", "2"], "question": ["q", "r"], "context": ["a b", "c"], "answers": answers}
    parquet.write_table(pa.table(rows), path)
    found = datasets.read(tasks.preset("squad2.0"), path)
    assert [e.answers for e in found] == [(("b", 2),), ()]
    with pytest.raises(ValueError, match=r"row 1, question 2: has no answer, and squad1\.1 knows no such"):
        datasets.read(tasks.preset("squad1.1"), path)


# ---- losses


def items_of(kind: str, count: int = 5) -> list[Item]:
    """Of 3 labels, or 3 sequences an item."""
    made = finetune_items.items("classify", 3 * count)
    draw, found = np.random.default_rng(5), []
    for i in range(count):
        first, *rest = made[3 * i : 3 * i + 3] if kind in tasks.COMPARED else made[i : i + 1]
        targets = draw.integers(0, 2, 3).astype(np.float32) if kind == "multilabel" else draw.integers(0, 3, 1)
        others = tuple((item.ids, item.second) for item in rest)
        positions = np.zeros(1 + len(rest), np.int64)
        found.append(Item(i, first.ids, first.second, positions, targets, NO_SPANS, others))
    return found


def expected(kind: str, logits: torch.Tensor, items: list[Item], weights: tuple[float, ...]) -> tuple[float, int]:
    """The loss and the right answers by their definitions, one item after the other."""
    total, right = 0.0, 0
    rows = logits.view(len(items), -1).double()
    weight = weights or (1.0,) * 3
    for row, item in zip(rows, items, strict=True):
        if kind == "multilabel":
            for value, target, w in zip(row.tolist(), item.targets.tolist(), weight, strict=True):
                p = 1 / (1 + math.exp(-value))
                total -= w * math.log(p) if target else math.log(1 - p)
                right += (value > 0) == bool(target)
        elif kind == "ordinal":
            (label,) = item.targets.tolist()
            for k, value in enumerate(row.tolist()):
                p = 1 / (1 + math.exp(-value))
                total -= weight[label] * math.log(p if label > k else 1 - p)
            right += [value > 0 for value in row.tolist()] == [label > k for k in range(2)]
        else:
            (label,) = item.targets.tolist()
            total -= weight[label] * float(torch.log_softmax(row, 0)[label])
            right += int(row.argmax()) == label
    return total, right


@pytest.mark.parametrize(
    "kind, outputs, weights",
    [
        ("multilabel", 3, ()),
        ("multilabel", 3, (0.5, 1.0, 4.0)),
        ("ordinal", 2, ()),
        ("ordinal", 2, (0.5, 1.0, 4.0)),
        ("choose", 1, ()),
        ("classify", 3, (0.5, 1.0, 4.0)),
    ],
)
def test_the_loss_is_what_its_definition_says(kind: str, outputs: int, weights: tuple[float, ...]) -> None:
    cfg = finetune_items.config()
    torch.manual_seed(3)
    shape = Shape(kind, outputs, class_weights=weights)
    module = heads.build(cfg, shape, finetune_items.weights(cfg), CPU, torch.float32).eval()
    torch.nn.init.normal_(module.head.output.weight, 0.0, 1.0)
    items = items_of(kind)
    batch = collate(items, Layout(kind, 16))
    logits = module.logits(**batch.reading())
    loss, right = module(**batch.inputs())
    want, count = expected(kind, logits.detach(), items, weights)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-5) and int(right) == count
    assert module.counts(batch) == (15 if kind == "multilabel" else 5,)
    nothing, none = module(**collate([], Layout(kind, 16)).inputs())
    assert float(nothing.detach()) == 0 and int(none) == 0
    nothing.backward()
    assert all(p.grad is not None for p in module.head.parameters())


def test_two_choices_have_ranknets_loss() -> None:
    values = torch.tensor([[1.5, 0.25]])
    assert F.cross_entropy(values, torch.tensor([0])).item() == pytest.approx(math.log1p(math.exp(0.25 - 1.5)))


def test_class_weights_are_given_or_balanced(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tsv", "t\ty\na\tx\nb\tx\nc\tx\nd\ty\n")
    task = tasks.custom("classify", ["t"], "y")
    train = datasets.read(task, path)
    weights = class_weights.weights_of(["balanced"], task, ("x", "y"), train)
    assert weights == (4 / (2 * 3), 4 / (2 * 1)) and class_weights.weights_of([], task, ("x", "y"), train) == ()
    assert class_weights.weights_of(["1", "2.5"], task, ("x", "y"), train) == (1.0, 2.5)
    several = tasks.custom("multilabel", ["t"], "y")
    texts = datasets.read(several, path)
    assert class_weights.weights_of(["balanced"], several, ("x", "y"), texts) == (1 / 3, 3 / 1)
    for given in (["1"], ["1", "0"], ["1", "nan"], ["even", "1"]):
        with pytest.raises(ValueError, match=r"--class-weights .*a number above 0 for each of x, y"):
            class_weights.weights_of(given, task, ("x", "y"), train)
    with pytest.raises(ValueError, match=r"squad1\.1 is span"):
        class_weights.weights_of(["balanced"], tasks.preset("squad1.1"), (), [])


# ---- figures, probabilities, predictions


def texts(labels: list[Any]) -> list[datasets.Text]:
    return [datasets.Text(str(i), f"line {i}", "t", None, label) for i, label in enumerate(labels)]


def test_figures_of_several_labels() -> None:
    task = tasks.custom("multilabel", ["t"], "y", ["micro_f1", "macro_f1", "accuracy"])
    truth = texts([("a",), ("a", "b"), (), ("b",)])
    found = metrics.score(task, truth, [["a"], ["a"], ["b"], None], ("a", "b"))
    # a: 2 right, none else; b: 0 right, 1 wrong, 2 missed
    assert found == {"micro_f1": pytest.approx(2 * 2 / (2 * 2 + 1 + 2)), "macro_f1": 0.5, "accuracy": 0.25}


def test_figures_of_an_order() -> None:
    task = tasks.custom("ordinal", ["t"], "y", ["kappa", "accuracy", "within_one", "spearman"])
    truth = texts(["1", "2", "3", "3"])
    found = metrics.score(task, truth, ["1", "3", "3", "1"], ("1", "2", "3"))
    assert found["accuracy"] == 0.5 and found["within_one"] == 0.75
    observed = (0 + 1 + 0 + 4) / 4
    by_chance = np.mean([(t - p) ** 2 for t in (1, 2, 3, 3) for p in (1, 3, 3, 1)])
    assert found["kappa"] == pytest.approx(1 - observed / by_chance)
    alike = metrics.score(task, truth, ["2", "2", "2", "2"], ("1", "2", "3"))
    assert alike["spearman"] == 0 and alike["kappa"] == 0
    assert metrics.score(task, truth, ["1", "2", None, "3"], ("1", "2", "3"))["within_one"] == 0.75


def test_figures_of_ranked_pairs_count_no_ties() -> None:
    task = tasks.custom("rank", choices=["a", "b"])
    truth = [datasets.Choices(str(i), "", None, ("x", "y"), "") for i in range(4)]
    assert metrics.score(task, truth, [[2.0, 1.0], [1.0, 1.0], [0.0, 1.0], None]) == {"accuracy": 0.25}


def test_an_ordinal_labels_probabilities_are_what_lies_between_decisions() -> None:
    task = tasks.custom("ordinal", ["t"], "y")
    for logits in ([2.0, 0.5, -1.0], [3.0, -0.5, 1.0], [-1.0, 2.0, 2.0], [1.0, 1.0, 1.0]):
        found = scores.probabilities(task, np.array(logits))
        assert found.min() >= 0 and found.sum() == pytest.approx(1)
        more = 1 - np.cumsum(found)[:-1]  # that it is above each label
        (decided,) = metrics.decode(task, texts(["a"]), items_of("ordinal", 1), [np.array(logits)], "abcd")
        assert decided == "abcd"[int((more > 0.5).sum())]


def made(kind: str, folder: Path) -> tuple[Path, Path]:
    """A model and a file of its task, never trained."""
    label = {"multilabel": ["a,b", "a", ""], "ordinal": ["1", "3", "2"], "choose": ["0", "1", "0"]}
    rows = [
        f"{t}\t{u}\t{y}"
        for t, u, y in zip(("w1 w2", "w3", "w4"), ("w5", "w6 w7", "w8"), label.get(kind, "xyx"), strict=True)
    ]
    path = write(folder / "t.tsv", "\n".join(["t\tu\ty", *rows]) + "\n")
    task = {
        "choose": tasks.custom("choose", ["t"], "y", choices=["u", "t"]),
        "rank": tasks.custom("rank", ["t"], choices=["u", "t"]),
    }.get(kind) or tasks.custom(kind, ["t"], "y")  # type: ignore[arg-type]
    return finetuned.make(folder, task, path), path


@pytest.mark.parametrize("kind", ["classify", "multilabel", "ordinal", "choose", "rank"])
def test_predictions_and_the_probabilities_behind_them(kind: str, tmp_path: Path) -> None:
    source, path = made(kind, tmp_path)
    behind = tmp_path / "new" / "scores.jsonl"
    assert prediction.predict_file(source, path, tmp_path / "out.tsv", discover({}), scores=str(behind)) == 3
    head, *lines = (tmp_path / "out.tsv").read_text().splitlines()
    found = [json.loads(line) for line in behind.read_text().splitlines()]
    assert [line["id"] for line in found] == ["0", "1", "2"]
    described = save.load(source, CPU).described
    if kind == "rank":
        assert head == "index\tu\tt"
        assert [[float(v) for v in line.split("\t")[1:]] for line in lines] == [x["prediction"] for x in found]
        prediction.predict_file(source, path, tmp_path / "one.tsv", discover({}), choices=["u"])
        alone = (tmp_path / "one.tsv").read_text().splitlines()
        assert alone[0] == "index\tprediction"
        assert [float(line.split("\t")[1]) for line in alone[1:]] == pytest.approx(
            [x["prediction"][0] for x in found], abs=1e-5
        )
        return
    assert head == "index\tprediction"
    for line, entry in zip(lines, found, strict=True):
        chances = entry["probabilities"]
        assert tuple(chances) == described.labels
        if kind == "multilabel":
            assert entry["prediction"] == [label for label, p in chances.items() if p > 0.5]
            assert line.split("\t")[1] == ",".join(entry["prediction"])
        else:
            assert sum(chances.values()) == pytest.approx(1) and line.split("\t")[1] == entry["prediction"]
        if kind in ("classify", "choose"):
            assert entry["prediction"] == max(chances, key=lambda label: chances[label])


def test_every_word_has_its_tags_probabilities(tmp_path: Path) -> None:
    path = write(tmp_path / "t.conll", "fox O\nshells B-A\n\nriver O\n")
    source = finetuned.make(tmp_path, tasks.custom("tag"), path)
    behind = tmp_path / "scores.jsonl"
    prediction.predict_file(source, path, tmp_path / "out.conll", discover({}), scores=str(behind))
    first, second = (json.loads(line) for line in behind.read_text().splitlines())
    assert first["words"] == ["fox", "shells"] and second["words"] == ["river"]
    tags = [line.split(" ")[-1] for line in (tmp_path / "out.conll").read_text().split("\n") if line]
    for tag, chances in zip(tags, first["probabilities"] + second["probabilities"], strict=True):
        assert set(chances) == {"O", "B-A"} and sum(chances.values()) == pytest.approx(1)
        assert tag == max(chances, key=lambda label: chances[label])


def test_answers_come_with_the_others_that_were_likely(tmp_path: Path) -> None:
    path = finetune_problem.write_questions(tmp_path / "q.json", 2, 1)
    source = finetuned.make(tmp_path, tasks.preset("squad1.1"), path)
    behind = tmp_path / "scores.jsonl"
    prediction.predict_file(source, path, tmp_path / "out.json", discover({}), scores=str(behind))
    answers = json.loads((tmp_path / "out.json").read_text())
    for line in map(json.loads, behind.read_text().splitlines()):
        assert answers[line["id"]] == line["prediction"] == line["n_best"][0]["text"]
        assert 0 <= line["no_answer_probability"] <= 1


# ---- defaults


def test_squads_presets_have_its_published_lengths() -> None:
    def lengths(task: Task, *given: str) -> tuple[int, int]:
        args = parse(["--model", "m", "--output", "o", "--task", task.name, *given])
        settings = settings_of(args, task)
        return settings.max_length, settings.stride

    assert lengths(tasks.preset("squad1.1")) == lengths(tasks.preset("squad2.0")) == (384, 128)
    assert lengths(tasks.preset("squad1.1"), "--max-length", "64") == (64, 128)
    assert lengths(tasks.preset("rte")) == (128, 64)

"""Scores: logits to predictions, predictions to metrics by their published rules, and the files of both.

All metrics are fractions (1.0 is best), correlations -1 to 1. A missing prediction counts as wrong. Where a rule divides by zero
(constant predictions, no entity anywhere) the metric is 0.
"""

from __future__ import annotations

import json
import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.files import write_whole
from megabert.finetune.datasets import Example
from megabert.finetune.encoding import TaskItem
from megabert.finetune.tasks import Task

# Tokens of an answer, and answers that are kept; both of Devlin et al. 2019's own code.
MAX_ANSWER = 30
N_BEST = 20
# In place of a missing prediction: equal to no label.
MISSING = ""
# Endings of predictions files; of the other kinds tsv.
SUFFIXES = {"tag": "conll", "span": "json"}

# Metrics by name, computed where they are asked for.
Figures = dict[str, Callable[[], float]]


# ---- logits to predictions


def decode(
    task: Task,
    examples: Sequence[Example],
    items: Sequence[TaskItem],
    logits: Sequence[np.ndarray],
    labels: Sequence[str],
    null_threshold: float = 0.5,
) -> list[Any]:
    """One prediction an example, None for one without an item. `logits[i]` are of item i:

    classify, choose [k] -> label; multilabel [k] -> list of labels; score [1] -> float; tag [p, k] -> list of tags; span [p, 2]
    (start, end) -> {"text": answer or "", "no_answer_probability": 0..1, "n_best": [{"text", "start", "probability"}, ...]}, ""
    where the task allows no answer and its probability is above `null_threshold`. The windows of one text are averaged. Raises
    ValueError for logits that are not finite.
    """
    predictions: list[Any] = []
    given: Any = examples
    for example, of in zip(given, windows_of(examples, items, logits), strict=True):
        if not of:
            predictions.append(None)
        elif task.kind == "span":
            windows = [(items[i].char_spans, np.asarray(logits[i], np.float64)) for i in of]
            predictions.append(_answer(example.context, windows, null_threshold if task.unanswerable else 1.0))
        elif task.kind == "tag":
            predictions.append([labels[k] for i in of for k in logits[i].argmax(-1)])
        else:
            predictions.append(_decided(task, mean_of([logits[i] for i in of]), labels))
    return predictions


def windows_of(examples: Sequence[Example], items: Sequence[TaskItem], logits: Sequence[np.ndarray]) -> list[list[int]]:
    """The items of each example in their order. Raises ValueError for logits that are not finite."""
    windows: list[list[int]] = [[] for _ in examples]
    for i, (item, values) in enumerate(zip(items, logits, strict=True)):
        if not np.isfinite(values).all():
            raise ValueError(
                f"{examples[item.example].where}: the model's output is not finite: its training diverged; "
                "lower the learning rate"
            )
        windows[item.example].append(i)
    return windows


def mean_of(windows: Sequence[np.ndarray]) -> np.ndarray:
    """fp64 [k], the mean over the windows of one text, [k] each."""
    return np.stack(windows).mean(0, dtype=np.float64)


def _decided(task: Task, logits: np.ndarray, labels: Sequence[str]) -> Any:
    """The prediction of a text's [k] logits."""
    if task.kind == "score":
        return float(logits[0])
    if task.kind == "multilabel":
        return [label for label, value in zip(labels, logits, strict=True) if value > 0]
    return labels[int(logits.argmax())]


def _answer(context: str, windows: Sequence[tuple[np.ndarray, np.ndarray]], threshold: float) -> dict[str, Any]:
    """The best answers over a question's windows, each a (char spans [p, 2], logits [p, 2]) pair."""
    best: dict[tuple[int, int], float] = {}
    null = math.inf
    for spans, logits in windows:
        # Of [CLS]; the window that is surest of an answer decides.
        null = min(null, float(logits[0].sum()))
        tokens = len(spans) - 1
        ends = np.append(logits[1:, 1], np.full(MAX_ANSWER, -np.inf))
        reach = np.lib.stride_tricks.sliding_window_view(ends, MAX_ANSWER)[:tokens]  # [tokens, MAX_ANSWER]
        values = (logits[1:, :1] + reach).ravel()
        for flat in np.argsort(-values, kind="stable")[:N_BEST].tolist():
            first, last = 1 + flat // MAX_ANSWER, 1 + flat // MAX_ANSWER + flat % MAX_ANSWER
            if last > tokens:
                continue
            begin = int(spans[first, 0])
            # The last token may be a blank.
            text = context[begin : int(spans[last, 1])].rstrip()
            if text:
                span = begin, begin + len(text)
                best[span] = max(best.get(span, -math.inf), float(values[flat]))
    ranked = sorted(best, key=lambda span: -best[span])[:N_BEST]
    if not ranked:
        return {"text": "", "no_answer_probability": 1.0, "n_best": []}
    top = best[ranked[0]]
    weights = np.exp([best[span] - top for span in ranked])
    n_best = [
        {"text": context[a:b], "start": a, "probability": float(p)}
        for (a, b), p in zip(ranked, weights / weights.sum(), strict=True)
    ]
    # Of the two, no answer and the best one.
    nothing = 1 / (1 + math.exp(min(top - null, 700.0)))
    answer = "" if nothing > threshold else n_best[0]["text"]
    return {"text": answer, "no_answer_probability": nothing, "n_best": n_best}


# ---- predictions to metrics


def score(
    task: Task, examples: Sequence[Example], predictions: Sequence[Any], labels: Sequence[str] = ()
) -> dict[str, float]:
    """The task's metrics by name, in their order; after best_f1 its threshold, best_f1_threshold.

    `labels` as in training, unless the task has them: the F1 of two classes is of the last one. Raises ValueError for
    examples without labels and for a score that is missing or not a finite number.
    """
    assert len(examples) == len(predictions) > 0
    given: Any = examples
    field = {"tag": "tags", "span": "answers"}.get(str(task.kind), "label")
    truth = [getattr(example, field) for example in given]
    if None in truth:
        raise ValueError(f"{given[truth.index(None)].where}: has no label to score against")
    if task.kind in ("classify", "choose"):
        figures = _classified(truth, predictions, labels or task.labels)
    elif task.kind == "multilabel":
        figures = _label_sets(truth, predictions, labels or task.labels)
    elif task.kind == "score":
        figures = _correlated(truth, predictions, given)
    elif task.kind == "tag":
        figures = _tagged(truth, predictions)
    else:
        figures = _answered(truth, predictions, task.unanswerable)
    wanted = [*task.metrics]
    if "best_f1" in wanted:
        wanted.insert(wanted.index("best_f1") + 1, "best_f1_threshold")
    with warnings.catch_warnings():
        # The libraries warn where they divide by zero.
        for category in (UserWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        return {name: float(figures[name]()) for name in wanted}


def _classified(truth: list[str], predictions: Sequence[str | None], labels: Sequence[str]) -> Figures:
    from sklearn import metrics

    labels_predicted = [MISSING if p is None else p for p in predictions]

    def f1() -> float:
        assert len(labels) == 2, labels
        of = labels[-1]
        return metrics.f1_score([t == of for t in truth], [p == of for p in labels_predicted], zero_division=0)

    def macro_f1() -> float:
        present = sorted({*truth, *labels_predicted} - {MISSING})
        return metrics.f1_score(truth, labels_predicted, labels=present, average="macro", zero_division=0)

    return {
        "accuracy": lambda: metrics.accuracy_score(truth, labels_predicted),
        "f1": f1,
        "macro_f1": macro_f1,
        "matthews": lambda: metrics.matthews_corrcoef(truth, labels_predicted),
    }


def _label_sets(
    truth: list[tuple[str, ...]], predictions: Sequence[Sequence[str] | None], labels: Sequence[str]
) -> Figures:
    """F1 over all decisions, or its mean over the labels, where a label that is neither true nor predicted anywhere counts 0."""
    from sklearn import metrics

    def marks(of: Sequence[Sequence[str] | None]) -> np.ndarray:
        return np.array([[label in (predicted or ()) for label in labels] for predicted in of])

    true, predicted = marks(truth), marks(predictions)
    missing = np.array([p is None for p in predictions])
    return {
        "micro_f1": lambda: metrics.f1_score(true, predicted, average="micro", zero_division=0),
        "macro_f1": lambda: metrics.f1_score(true, predicted, average="macro", zero_division=0),
        "accuracy": lambda: ((true == predicted).all(1) & ~missing).mean(),
    }


def _correlated(truth: list[float], predictions: Sequence[float | None], examples: Sequence[Example]) -> Figures:
    from scipy import stats

    for example, p in zip(examples, predictions, strict=True):
        if p is None or not math.isfinite(p):
            raise ValueError(f"{example.where}: prediction {p} is not a finite number; a correlation needs all")

    def correlation(of: Callable[..., Any]) -> float:
        if len(truth) < 2:
            return 0.0
        coefficient = float(of(truth, predictions).statistic)
        return 0.0 if math.isnan(coefficient) else coefficient

    return {"pearson": lambda: correlation(stats.pearsonr), "spearman": lambda: correlation(stats.spearmanr)}


def _tagged(truth: list[tuple[str, ...]], predictions: Sequence[Sequence[str] | None]) -> Figures:
    """Entities as conlleval counts them, which is seqeval's default: an I- tag may begin an entity."""

    def entities(which: int) -> float:
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

        predicted = [["O"] * len(t) if p is None else list(p) for t, p in zip(truth, predictions, strict=True)]
        true = [list(t) for t in truth]
        return float(precision_recall_fscore_support(true, predicted, average="micro", zero_division=0)[which])

    def accuracy() -> float:
        pairs = zip(truth, predictions, strict=True)
        correct = sum(a == b for t, p in pairs if p is not None for a, b in zip(t, p, strict=True))
        return correct / sum(map(len, truth))

    return {
        "precision": lambda: entities(0),
        "recall": lambda: entities(1),
        "f1": lambda: entities(2),
        "accuracy": accuracy,
    }


# ---- SQuAD's rules


def _answered(
    truth: list[tuple[tuple[str, int], ...]], predictions: Sequence[dict[str, Any] | None], unanswerable: bool
) -> Figures:
    gold = [_gold(answers, unanswerable) for answers in truth]
    has_answer = [bool(answers) for answers in truth]

    def mean(figure: Callable[[str, str], float]) -> float:
        return sum(
            max(figure(p["text"], answer) for answer in answers)
            for answers, p in zip(gold, predictions, strict=True)
            if p is not None
        ) / len(gold)

    return {
        "em": lambda: mean(lambda predicted, answer: normalized(predicted) == normalized(answer)),
        "f1": lambda: mean(lambda predicted, answer: overlap(predicted, answer, unanswerable)),
        "best_f1": lambda: _best_threshold(gold, has_answer, predictions)[0],
        "best_f1_threshold": lambda: _best_threshold(gold, has_answer, predictions)[1],
    }


def _gold(answers: Sequence[tuple[str, int]], unanswerable: bool) -> list[str]:
    """2.0 drops answers that are empty once normalised, and has "" for none; 1.1 takes them as they are."""
    texts = [text for text, _ in answers]
    if unanswerable:
        texts = [text for text in texts if normalized(text)] or [""]
    return texts


def normalized(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, one space between words: in SQuAD's order."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def overlap(predicted: str, answer: str, unanswerable: bool) -> float:
    """F1 of the two bags of words. Where one has no word: 1 if both have none by 2.0's rule, 0 by 1.1's."""
    a, b = normalized(predicted).split(), normalized(answer).split()
    common = sum((Counter(a) & Counter(b)).values())
    if unanswerable and not (a and b):
        return float(a == b)
    return 2 * common / (len(a) + len(b)) if common else 0.0


def _best_threshold(
    gold: list[list[str]], has_answer: list[bool], predictions: Sequence[dict[str, Any] | None]
) -> tuple[float, float]:
    """The best F1 that a threshold on the probability of no answer gives, and the lowest such threshold."""
    whole = zip(predictions, gold, has_answer, strict=True)
    given = [(p, answers, has) for p, answers, has in whole if p is not None]
    # Where no question is answered.
    now = best = float(sum(not has for _, _, has in given))
    threshold = 0.0
    for p, answers, has in sorted(given, key=lambda g: g[0]["no_answer_probability"]):
        text = p["n_best"][0]["text"] if p["n_best"] else ""
        if has:
            now += max(overlap(text, answer, True) for answer in answers)
        elif text:
            now -= 1
        if now > best:
            best, threshold = now, p["no_answer_probability"]
    return best / len(gold), threshold


# ---- files of predictions and of probabilities


@dataclass(frozen=True)
class PredictionForm:
    """A file with a `line` for each example that has one, `between` two of them, `begin` and `end`; or `empty`."""

    # Of an example and its prediction.
    line: Callable[[Any, Any], str | None]
    begin: str = ""
    between: str = ""
    end: str = ""
    empty: str = ""

    def lines(self, examples: Sequence[Any], predictions: Sequence[Any]) -> str:
        """Those of some examples, without `begin` and `end`."""
        lines = (self.line(e, p) for e, p in zip(examples, predictions, strict=True))
        return self.between.join(line for line in lines if line is not None)


# Of what `probability_lines` gives.
PROBABILITIES = PredictionForm(lambda _example, line: json.dumps(line, ensure_ascii=False) + "\n")


def forms(task: Task, path: Path) -> dict[Path, PredictionForm]:
    """The files that predictions are written to; a missing one is left out, or an empty field where a line must be.

    Of texts: TSV with GLUE's columns `index` and `prediction` (several labels with commas between). Tags: word, true tag if known,
    predicted tag, as conlleval reads it, with tabs between them in a sentence where one contains a space. Spans: SQuAD's JSON of id
    and text, and for 2.0 beside it `<name>.no_answer.json`, the probability of none.
    """
    if task.kind == "span":
        files = {path: _json_form(lambda p: p["text"])}
        if task.unanswerable:
            beside = path.with_name(f"{path.name.removesuffix('.json')}.no_answer.json")
            files[beside] = _json_form(lambda p: p["no_answer_probability"])
        return files
    if task.kind == "tag":
        return {path: PredictionForm(_tagged_words, between="\n")}
    head = "index\tprediction\n"
    return {path: PredictionForm(lambda e, p: f"{e.id}\t{_cell(p)}\n", begin=head, empty=head)}


def _cell(prediction: Any) -> str:
    if prediction is None:
        return ""
    return ",".join(prediction) if isinstance(prediction, list) else str(prediction)


def _tagged_words(example: Any, tags: Sequence[str] | None) -> str:
    columns = [example.words, *([example.tags] if example.tags else []), tags or ["O"] * len(example.words)]
    between = "\t" if any(" " in field for column in columns for field in column) else " "
    return "".join(between.join(row) + "\n" for row in zip(*columns, strict=True))


def _json_form(value: Callable[[Any], Any]) -> PredictionForm:
    """A JSON object with a value an id."""

    def line(example: Any, prediction: Any) -> str | None:
        if not prediction:
            return None
        key, shown = (json.dumps(v, ensure_ascii=False) for v in (example.id, value(prediction)))
        return f" {key}: {shown}"

    return PredictionForm(line, begin="{\n", between=",\n", end="\n}\n", empty="{}\n")


def write(task: Task, examples: Sequence[Example], predictions: Sequence[Any], path: str | Path) -> None:
    """The predictions files (`forms`), each whole or not at all."""
    for target, form in forms(task, Path(path)).items():
        lines = form.lines(examples, predictions)
        text = form.begin + lines + form.end if lines else form.empty
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text.encode())


def probability_lines(
    task: Task,
    examples: Sequence[Example],
    items: Sequence[TaskItem],
    logits: Sequence[np.ndarray],
    predictions: Sequence[Any],
    labels: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """`{"id", "prediction", …}` of each example, in their order, and with it

    classify, choose, multilabel: "probabilities" by label; those of multilabel are independent.
    tag: "words", and "probabilities" by tag, one a word.
    span: "no_answer_probability" and "n_best" answers with theirs.
    score: nothing.
    """
    windows = windows_of(examples, items, logits)
    given: Any = examples
    for example, of, prediction in zip(given, windows, predictions, strict=True):
        line: dict[str, Any] = {"id": example.id, "prediction": prediction}
        if task.kind == "span":
            line = {"id": example.id, **({} if prediction is None else {"prediction": prediction["text"]} | prediction)}
            line.pop("text", None)
        elif task.kind == "tag":
            line["words"] = list(example.words)
            rows = (row for i in of for row in softmax(np.asarray(logits[i], np.float64)))
            line["probabilities"] = [_by_label(labels, row) for row in rows]
        elif task.kind != "score" and of:
            mean = mean_of([logits[i] for i in of])
            line["probabilities"] = _by_label(labels, sigmoid(mean) if task.kind == "multilabel" else softmax(mean))
        yield line


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * logits))


def _by_label(labels: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return dict(zip(labels, values.tolist(), strict=True))

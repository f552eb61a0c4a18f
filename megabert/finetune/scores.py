"""Scores: logits to predictions, predictions to metrics by their published rules, and the files of predictions.

All metrics are fractions (1.0 is best), correlations -1 to 1, mae in the unit of the scores. If a rule divides by zero
(constant predictions, no entity anywhere) the metric is 0.
"""

from __future__ import annotations

import json
import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.errors import BadTraining
from megabert.common.files import large_atomic_file, write_atomically
from megabert.finetune.encoding import TaskItem
from megabert.finetune.tasks import LABELLED, RANKING_METRICS, Task

# Logits of items, [p, K] or of a text [K]; labels in the order of the classes.
Logits = Sequence[np.ndarray]
Labels = Sequence[str]
# Most tokens of an answer, and number of candidate answers; both from the code of Devlin et al. 2019.
MAX_ANSWER = 30
N_BEST = 20
# Largest log odds of a threshold; its probability would be rounded to 1 beyond 36.
MOST_ODDS = 30.0


# ---- logits to predictions


class WordTags(list[str]):
    """Tags of a sentence's words; `tokens`: tags and characters of its tokens, of a model that tags all of them."""

    tokens: tuple[Sequence[str], Sequence[tuple[int, int]]] | None = None


def _tags(items: Sequence[TaskItem], logits: Logits, labels: Labels) -> WordTags:
    """Of the windows of a sentence, in order."""
    tags, tokens, places = WordTags(), [], []
    for item, values in zip(items, logits, strict=True):
        found = [labels[k] for k in values.argmax(-1)]
        tags += found if item.words is None else [found[k] for k in item.words]
        tokens += found
        places += [(start, end) for start, end in item.char_spans.tolist()]
    if len(places) == len(tokens):
        tags.tokens = tokens, places
    return tags


def refuse_non_finite(examples: Sequence[Any], items: Sequence[TaskItem], logits: Logits) -> None:
    """Raises BadTraining naming the first example with an output that is not finite."""
    for item, values in zip(items, logits, strict=True):
        if not np.isfinite(values).all():
            where = examples[item.example].where
            raise BadTraining(f"{where}: the model's output is not finite: its training diverged; lower --lr")


def decode(
    task: Task,
    examples: Sequence[Any],
    items: Sequence[TaskItem],
    logits: Logits,
    labels: Labels,
    threshold: float = 0.5,
) -> list[Any]:
    """One prediction for each example; with two labels the second if its probability is above `threshold`. `logits[i]` are of item i:

    classify [k] -> label; multilabel [k] -> list of labels; score [1] -> float; tag [p, k] -> list of tags; span [p, 2]
    (start, end) -> {"text": answer or "", "no_answer_probability": 0..1}, with text "" if the task allows no answer and its
    probability is above a half. Raises BadTraining for non-finite logits.
    """
    refuse_non_finite(examples, items, logits)
    groups: list[tuple[list[TaskItem], list[np.ndarray]]] = [([], []) for _ in examples]
    for item, values in zip(items, logits, strict=True):
        of_example = groups[item.example]
        of_example[0].append(item)
        of_example[1].append(values)
    if task.kind == "span":
        least = 0.5 if task.unanswerable else 1.0
        return [_answer(example.context, *group, least) for example, group in zip(examples, groups, strict=True)]
    if task.kind == "tag":
        return [_tags(*group, labels) for group in groups]
    texts = [values for _, (values,) in groups]
    if task.kind == "score":
        return [float(values[0]) for values in texts]
    if task.kind == "multilabel":
        return [[label for label, value in zip(labels, values, strict=True) if value > 0] for values in texts]
    if len(labels) == 2:
        least = log_odds(threshold)
        return [labels[int(margin > least)] for margin in margins(texts)]
    return [labels[int(values.argmax())] for values in texts]


def probabilities(task: Task, logits: Logits) -> list[list[float]]:
    """Of each text the probability of each label, by the softmax, or of several labels by the sigmoid, of its logits [k]."""
    from scipy import special

    values = np.asarray(logits, np.float64).reshape(len(logits), -1)
    return (special.expit(values) if task.kind == "multilabel" else special.softmax(values, axis=1)).tolist()


def margins(logits: Logits) -> np.ndarray:
    """float64 [n]: log odds of the second of two labels."""
    both = np.asarray(logits, np.float64)
    return both[:, 1] - both[:, 0]


def log_odds(probability: float) -> float:
    """Natural logarithm of p / (1 - p)."""
    return math.log(probability / (1 - probability))


def best_threshold(truth: Sequence[str], logits: Logits, labels: Labels) -> float:
    """The probability above which predicting the second of two labels has the best F1; a half if no example has it. It is midway, in
    log odds, between two examples, so that rounding cannot change a prediction, but within +-MOST_ODDS."""
    from sklearn import metrics

    odds = margins(logits)
    if labels[1] not in truth:
        return 0.5
    precision, recall, least = metrics.precision_recall_curve([label == labels[1] for label in truth], odds)
    at = int(np.argmax(2 * precision * recall / np.maximum(precision + recall, 1e-12)))
    middle = float(least[at] + least[at - 1]) / 2 if at else float(least[0]) - 1
    return 1 / (1 + math.exp(-min(max(middle, -MOST_ODDS), MOST_ODDS)))


def _answer(context: str, items: Sequence[TaskItem], logits: Logits, threshold: float) -> dict[str, Any]:
    """The best answer over a question's windows, whose logits are [p, 2] each; none if its probability is above `threshold`."""
    best, answer, null = -math.inf, "", math.inf
    for spans, scores in ((item.char_spans, of.astype(np.float64)) for item, of in zip(items, logits, strict=True)):
        # Lowest score of [CLS] over all windows, as in run_squad.py of Devlin et al. 2019.
        null = min(null, float(scores[0].sum()))
        tokens = len(spans) - 1
        ends = np.append(scores[1:, 1], np.full(MAX_ANSWER, -np.inf))
        reach = np.lib.stride_tricks.sliding_window_view(ends, MAX_ANSWER)[:tokens]  # [tokens, MAX_ANSWER]
        values = (scores[1:, :1] + reach).ravel()
        for flat in np.argsort(-values, kind="stable")[:N_BEST].tolist():
            first, last = 1 + flat // MAX_ANSWER, 1 + flat // MAX_ANSWER + flat % MAX_ANSWER
            # The last token may be blank.
            text = context[int(spans[first, 0]) : int(spans[last, 1])].rstrip() if last <= tokens else ""
            if text and values[flat] > best:
                best, answer = float(values[flat]), text
    # Between no answer and the best one; 1 if no token has text.
    nothing = 1 / (1 + math.exp(min(best - null, 700.0))) if answer else 1.0
    return {"text": "" if nothing > threshold else answer, "no_answer_probability": nothing}


# ---- predictions to metrics


def collect_truth(task: Task, examples: Sequence[Any]) -> list[Any]:
    """The correct predictions. Raises ValueError for examples without labels."""
    field = {"tag": "tags", "span": "answers"}.get(task.kind, "label")
    truth: list[Any] = [getattr(example, field) for example in examples]
    if None in truth:
        raise ValueError(f"{examples[truth.index(None)].where}: has no label to score against")
    return truth


def score(
    task: Task, examples: Sequence[Any], predictions: Sequence[Any], labels: Labels = (), logits: Logits = ()
) -> dict[str, float]:
    """The task's metrics by name, in their order.

    `labels` as in training: with two classes F1 and AUROC are of the second one; AUROC is of `logits`. Raises ValueError for
    examples without labels.
    """
    truth = collect_truth(task, examples)
    with warnings.catch_warnings():
        # The libraries warn about divisions by zero.
        warnings.simplefilter("ignore")
        if task.kind == "classify":
            values = _classified(truth, predictions, labels)
            if "auroc" in task.metrics:
                from sklearn import metrics

                second = [label == labels[1] for label in truth]
                values["auroc"] = metrics.roc_auc_score(second, margins(logits)) if len(set(truth)) > 1 else 0.0
        elif task.kind == "multilabel":
            values = _label_sets(truth, predictions, labels)
        elif task.kind == "score":
            values = _correlated(truth, predictions)
            if set(RANKING_METRICS) & set(task.metrics):
                values |= _ranked([example.a for example in examples], truth, predictions)
        elif task.kind == "tag":
            values = _tagged(*([list(tags) for tags in of] for of in (truth, predictions)))
        else:
            values = _answered(truth, predictions, task.unanswerable)
    return {name: float(values[name]) for name in task.metrics}


def _classified(truth: list[str], predictions: Sequence[str], labels: Labels) -> dict[str, float]:
    from sklearn import metrics

    present = sorted({*truth, *predictions})
    true, positive = ([label == labels[-1] for label in of] for of in (truth, predictions))
    return {
        "accuracy": metrics.accuracy_score(truth, predictions),
        "f1": metrics.f1_score(true, positive, zero_division=0),
        "macro_f1": metrics.f1_score(truth, predictions, labels=present, average="macro", zero_division=0),
        "matthews": metrics.matthews_corrcoef(truth, predictions),
    }


def _indicators(sets: Sequence[Sequence[str]], labels: Labels) -> Any:
    """bool [n, K]: which labels each set has."""
    return np.array([[label in chosen for label in labels] for chosen in sets])


def _label_sets(truth: Sequence[Any], predictions: Sequence[Any], labels: Labels) -> dict[str, float]:
    """F1 over all decisions, or its mean over the labels, with 0 for a label that is never true nor predicted."""
    from sklearn import metrics

    true, predicted = _indicators(truth, labels), _indicators(predictions, labels)
    return {
        "micro_f1": metrics.f1_score(true, predicted, average="micro", zero_division=0),
        "macro_f1": metrics.f1_score(true, predicted, average="macro", zero_division=0),
        "accuracy": metrics.accuracy_score(true, predicted),
    }


def _correlated(truth: list[float], predictions: Sequence[float]) -> dict[str, float]:
    from scipy import stats

    error = {"mae": float(np.abs(np.subtract(truth, predictions)).mean())}
    if len(truth) < 2:
        return {"pearson": 0.0, "spearman": 0.0} | error
    results = {"pearson": stats.pearsonr(truth, predictions), "spearman": stats.spearmanr(truth, predictions)}
    return {name: float(np.nan_to_num(result.statistic)) for name, result in results.items()} | error


def _ranked(queries: Sequence[str], truth: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Means over the queries with several texts, of which one is relevant (score above 0): the reciprocal rank of the best ranked
    relevant one (ties rank it last), and nDCG with the scores as gains, ties averaged (Järvelin and Kekäläinen 2002; McSherry and
    Najork 2008). No score is below 0."""
    from sklearn import metrics

    by_query: dict[str, list[int]] = {}
    for i, query in enumerate(queries):
        by_query.setdefault(query, []).append(i)
    true, predicted = np.asarray(truth), np.asarray(predictions)
    reciprocal, gains = [], []
    for places in by_query.values():
        gain, value = true[places], predicted[places]
        if len(places) > 1 and gain.max() > 0:
            best = value[gain > 0].max()
            reciprocal.append(1 / (1 + int((value[gain == 0] >= best).sum())))
            gains.append(float(metrics.ndcg_score([gain], [value])))
    return {"mrr": float(np.mean(reciprocal or [0.0])), "ndcg": float(np.mean(gains or [0.0]))}


def _tagged(truth: list[list[str]], predictions: Sequence[list[str]]) -> dict[str, float]:
    """Entities by the rules of conlleval, seqeval's default: an I- tag may begin an entity."""
    from seqeval.metrics import accuracy_score
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    precision, recall, f1, _ = precision_recall_fscore_support(truth, predictions, average="micro", zero_division=0)
    return {"precision": precision, "recall": recall, "f1": f1, "accuracy": accuracy_score(truth, predictions)}


def by_label(
    task: Task, examples: Sequence[Any], predictions: Sequence[Any], labels: Labels
) -> list[tuple[str, float, float, float, int]]:
    """(label, precision, recall, F1, support) of every label, for tags of every kind of entity; [] for kinds without labels."""
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support as of_entities
    from sklearn import metrics

    if task.kind not in LABELLED:
        return []
    truth: list[Any] = collect_truth(task, examples)
    names = list(labels)
    if task.of_entities:
        truth, predictions = ([list(tags) for tags in of] for of in (truth, predictions))
        names = sorted({tag[2:] for of in (truth, predictions) for tags in of for tag in tags if tag != "O"})
        if not names:
            return []
        values = of_entities(truth, predictions, average=None, zero_division=0)
    elif task.kind == "multilabel":
        sets = (_indicators(of, labels) for of in (truth, predictions))
        values = metrics.precision_recall_fscore_support(*sets, zero_division=0)
    else:
        if task.kind == "tag":
            truth, predictions = ([tag for tags in of for tag in tags] for of in (truth, predictions))
        values = metrics.precision_recall_fscore_support(truth, predictions, labels=names, zero_division=0)
    return [(name, float(p), float(r), float(f), int(n)) for name, p, r, f, n in zip(names, *values, strict=True)]


# ---- SQuAD's rules


def _answered(truth: Sequence[Any], predictions: Sequence[Any], unanswerable: bool) -> dict[str, float]:
    gold = [[text for text, _ in answers] for answers in truth]
    if unanswerable:
        # 2.0 drops answers that are empty once normalised, and has "" for none; 1.1 takes them as they are.
        gold = [[text for text in texts if normalized(text)] or [""] for texts in gold]

    def mean(score: Callable[[str, str], float]) -> float:
        pairs = zip(gold, predictions, strict=True)
        return sum(max(score(p["text"], answer) for answer in answers) for answers, p in pairs) / len(gold)

    return {
        "em": mean(lambda predicted, answer: normalized(predicted) == normalized(answer)),
        "f1": mean(lambda predicted, answer: overlap(predicted, answer, unanswerable)),
    }


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


# ---- files of predictions


def suffix(task: Task, examples: Sequence[Any]) -> str:
    """The ending of a predictions file."""
    tagged = "jsonl" if task.kind == "tag" and examples and examples[0].text else "conll"
    return {"tag": tagged, "span": "json"}.get(task.kind, "tsv")


def no_answer_file(path: Path) -> Path:
    """The file beside predictions for SQuAD 2.0, of the probability of no answer."""
    return path.with_name(f"{path.name.removesuffix('.json')}.no_answer.json")


def write(task: Task, chunks: Iterable[tuple[Sequence[Any], ...]], path: Path, labels: Labels = ()) -> int:
    """Write the predictions of (examples, predictions) one chunk after the other, whole or not at all; their number.

    Of texts: TSV with GLUE's columns `index` and `prediction` (several labels with commas between), and one for each of `labels`, of
    whose `probabilities` the chunks then have a third part. Tags: word, true tag if known, predicted tag, as conlleval reads it, with
    tabs between them in a sentence where one contains a space; of plain texts JSON lines of `text` and `spans`, as they are read.
    Spans: SQuAD's JSON of id and text, and for 2.0 beside it `<name>.no_answer.json`, the probability of none.
    """
    count, answers, doubts = 0, {}, {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with large_atomic_file(path) as file:
        if task.kind not in ("tag", "span"):
            file.write(("\t".join(["index", "prediction", *labels]) + "\n").encode())
        for example, prediction, *more in (row for chunk in chunks for row in zip(*chunk, strict=True)):
            if task.kind == "span":
                answers[example.id] = prediction["text"]
                doubts[example.id] = prediction["no_answer_probability"]
            elif task.kind == "tag" and example.text:
                tree = {"text": example.text, "spans": find_spans(task, example, prediction)}
                file.write((json.dumps(tree, ensure_ascii=False) + "\n").encode())
            elif task.kind == "tag":
                file.write((("\n" if count else "") + _tagged_words(example, prediction)).encode())
            else:
                shown = ",".join(prediction) if isinstance(prediction, list) else prediction
                cells = [example.id, str(shown), *(f"{p:.6f}" for p in (more[0] if more else ()))]
                file.write(("\t".join(cells) + "\n").encode())
            count += 1
        if task.kind == "span":
            file.write(_as_json(answers))
        if task.unanswerable:
            write_atomically(no_answer_file(path), _as_json(doubts))
    return count


def find_spans(task: Task, example: Any, tags: Sequence[str]) -> list[dict[str, Any]]:
    """The spans in characters of a plain text's tags, of tokens where they are known, as transformers' pipeline gives them with
    aggregation_strategy="simple"; one for each word if the tags are not of entities."""
    from seqeval.metrics.sequence_labeling import get_entities

    places = example.places
    entities = [(tag, i, i) for i, tag in enumerate(tags)]
    if task.of_entities:
        if isinstance(tags, WordTags) and tags.tokens:
            tags, places = tags.tokens
        entities = get_entities(list(tags))
    spans = [(places[first][0], places[last][1], label) for label, first, last in entities]
    return [{"start": start, "end": end, "label": label} for start, end, label in spans if start < end]


def _tagged_words(example: Any, tags: Sequence[str]) -> str:
    columns = [example.words, *([example.tags] if example.tags else []), tags]
    between = "\t" if any(" " in field for column in columns for field in column) else " "
    return "".join(between.join(row) + "\n" for row in zip(*columns, strict=True))


def _as_json(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()

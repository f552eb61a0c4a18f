"""Tasks as data: file layouts, predictions and metrics. A new task is an entry of `PRESETS`.

    classify    one label of a set for a text or a pair of texts
    multilabel  any number of labels of a set for a text or a pair of texts
    score       one number for a text or a pair of texts, or for each text in the list of a query
    tag         one label for each word of a sentence
    span        the span of a context that answers a question, or none

The presets are GLUE's nine (Wang et al. 2019), with the file layouts its site publishes and the metrics of its leader board,
SQuAD 1.1 (Rajpurkar et al. 2016) and 2.0 (Rajpurkar et al. 2018), and CoNLL-2003 (Tjong Kim Sang and De Meulder 2003).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megabert.hf.hub import model_folder

# file in a fine-tuned model's folder
DESCRIPTION = "task.json"
Kind = Literal["classify", "multilabel", "score", "tag", "span"]
KINDS: tuple[str, ...] = get_args(Kind)
Names = Sequence[str]
# Kinds whose labels are by default those of the training file.
LABELLED = ("classify", "multilabel", "tag")
# Metrics of each kind, the default one first. For classify f1 and auroc need two labels. Accuracy of multilabel counts texts whose
# labels are all correct, that of tag words; f1, precision and recall of tag are of entities. mrr and ndcg are for rankings, the
# second texts with the same first text.
METRICS: dict[str, tuple[str, ...]] = {
    "classify": ("accuracy", "f1", "macro_f1", "matthews", "auroc"),
    "multilabel": ("micro_f1", "macro_f1", "accuracy"),
    "score": ("pearson", "spearman", "mae", "mrr", "ndcg"),
    "tag": ("f1", "precision", "recall", "accuracy"),
    "span": ("f1", "em"),
}
# Metrics of two labels, of rankings, and of entities.
BINARY_METRICS, RANKING_METRICS, ENTITY_METRICS = ("f1", "auroc"), ("mrr", "ndcg"), ("f1", "precision", "recall")


def goodness(metric: str, value: float) -> float:
    """A metric's value with a sign such that larger is better; NaN is the worst."""
    return -math.inf if math.isnan(value) else -value if metric == "mae" else value


@dataclass(frozen=True)
class Task:
    """The files of a task and the metrics of its predictions. Raises ValueError for fields that contradict each other.

    A column of a table is a name in its header, or a number from 0 in a table without a header, or several of these separated by |,
    of which the first existing one is used. In JSON lines and Arrow tables it may also have the forms of `--text-field`: `a.b` is
    nested, `a+b` joined. A tag task's columns are numbers, -1 the last one.
    """

    name: str
    kind: Kind
    # One column, or two for a pair; () for SQuAD's JSON.
    text: tuple[str, ...] = ()
    label: str = ""
    # "": examples are numbered from 0.
    id: str = ""
    # (): the sorted labels of the training file. F1 is of the last one.
    labels: tuple[str, ...] = ()
    # (): the kind's first one. The first one selects the best weights.
    metrics: tuple[str, ...] = ()
    # A question may have no answer (SQuAD 2.0).
    unanswerable: bool = False
    # The published table has rows cut at a tab or line end; they are skipped.
    cut_rows: bool = False
    # The published table without a header has rows with additional last columns.
    ragged: bool = False
    # Default tokens of a text or window, and between the starts of windows.
    max_length: int = 128
    stride: int = 64

    def __post_init__(self) -> None:
        if not self.metrics:
            object.__setattr__(self, "metrics", METRICS[self.kind][:1])
        for problem in self._problems():
            raise ValueError(f"task {self.name}: {problem}")

    def _problems(self) -> Iterator[str]:
        for metric in self.metrics:
            if metric not in METRICS[self.kind]:
                yield f"metric {metric!r} is none of those of {self.kind}: {', '.join(METRICS[self.kind])}"
            if metric in RANKING_METRICS and not self.pair:
                yield f"metric {metric} is of pairs, a query and a text; name two text columns"
        columns = self.columns(labelled=True)
        if self.kind == "span" and any(columns):
            yield "its file is SQuAD's JSON, which has no columns to name"
        most = {"span": 0, "tag": 1}.get(self.kind, 2)
        if most and not (self.label and all(self.text) and 1 <= len(self.text) <= most):
            texts = "one text column" if most == 1 else "one or two text columns"
            yield f"{self.kind} takes {texts} and a label column; name them"
        if self.kind == "tag" and self.id:
            yield "sentences of words are numbered and have no id"
        if self.kind == "tag" and not all(column.removeprefix("-").isdecimal() for column in columns):
            yield "columns of words and tags are numbers"
        if len({column.removeprefix("-").isdecimal() for column in columns}) > 1:
            yield "give all columns by name or all by number"
        if len(set(self.labels)) < len(self.labels):
            yield f"the labels {', '.join(self.labels)} are not distinct"
        if self.labels and self.kind not in LABELLED:
            yield f"{self.kind} has no labels"

    def columns(self, labelled: bool) -> list[str]:
        """The columns of a table in order: texts, label, id."""
        return [*self.text, *([self.label] if labelled else []), *([self.id] if self.id else [])]

    def find_label(self, value: str) -> str:
        """The label for a value in a file: the hub's tables of GLUE have numbers, or other names."""
        if value in self.labels or (names := HUB_CLASSES.get(self.name)) is None:
            return value
        number = int(value) if value.isdecimal() else names.index(value) if value in names else len(names)
        return (self.labels if self.labels == _BINARY else names)[number] if number < len(names) else value

    @property
    def pair(self) -> bool:
        return len(self.text) == 2

    @property
    def of_entities(self) -> bool:
        """Whether tags are those of entities, by the metrics."""
        return self.kind == "tag" and not set(ENTITY_METRICS).isdisjoint(self.metrics)


def custom(
    kind: Kind, text: Names = (), label: str = "", metrics: Names = (), id: str = "", labels: Names = ()
) -> Task:
    """A user-defined task. The default columns of a tag task are 0 for the word and -1 for the tag."""
    if kind == "tag":
        text, label = text or ("0",), label or "-1"
    return Task("custom", kind, tuple(text), label, id, tuple(labels), tuple(metrics))


_BINARY, _F1 = ("0", "1"), ("f1", "accuracy")
_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCES, _QUESTIONS = ("sentence1", "sentence2"), ("question1", "question2")
_STRINGS = ("#1 String|sentence1", "#2 String|sentence2")
_PREMISES = ("sentence1|premise", "sentence2|hypothesis")
_THREE = ("contradiction", "entailment", "neutral")
# Names of the classes 0, 1, … in the hub's tables (nyu-mll/glue).
HUB_CLASSES = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qqp": ("not_duplicate", "duplicate"),
    "mnli": ("entailment", "neutral", "contradiction"),
    "qnli": _ENTAILMENT,
    "rte": _ENTAILMENT,
    "wnli": _ENTAILMENT[::-1],
}

PRESETS: dict[str, Task] = {
    task.name: task
    for task in (
        # CoLA's original columns are source, label, the author's mark and the sentence, without a header; STS-B's genre, file, year,
        # number, score and the sentences. Names after | are the hub's.
        Task("cola", "classify", ("sentence|3",), "label|1", labels=_BINARY, metrics=("matthews", "accuracy")),
        Task("sst2", "classify", ("sentence|content",), "label", labels=_BINARY),
        Task("mrpc", "classify", _STRINGS, "Quality|label", labels=_BINARY, metrics=_F1),
        Task(
            "stsb", "score", ("sentence1|5", "sentence2|6"), "score|label|4", metrics=METRICS["score"][:2], ragged=True
        ),
        Task("qqp", "classify", _QUESTIONS, "is_duplicate|label", labels=_BINARY, metrics=_F1, cut_rows=True),
        Task("mnli", "classify", _PREMISES, "gold_label|label", labels=_THREE),
        Task("qnli", "classify", ("question", "sentence"), "label", labels=_ENTAILMENT),
        Task("rte", "classify", _SENTENCES, "label", labels=_ENTAILMENT),
        Task("wnli", "classify", _SENTENCES, "label", labels=_BINARY),
        # JSON lines of a query with texts and scores, or with positives and negatives.
        Task("ranking", "score", ("query", "texts|positives"), "scores|negatives", metrics=("ndcg", "mrr")),
        # Lengths for SQuAD: Devlin et al. 2019.
        Task("squad1.1", "span", metrics=("f1", "em"), max_length=384, stride=128),
        Task("squad2.0", "span", metrics=("f1", "em"), unanswerable=True, max_length=384, stride=128),
        # CoNLL-2003's columns are token, part of speech, chunk and tag; copies of it keep token and tag.
        Task("conll2003", "tag", ("0",), "-1", metrics=METRICS["tag"]),
    )
}


def preset(name: str) -> Task:
    """The preset of that name. Raises ValueError listing them."""
    if name not in PRESETS:
        raise ValueError(f"no task {name!r}; known are {', '.join(PRESETS)}; or describe one by its columns")
    return PRESETS[name]


def find(source: str | Path) -> Path | None:
    """The folder of a fine-tuned model: `source` or its `best`; None if it is neither."""
    places = Path(source), Path(source) / "best"
    return next((folder for folder in places if (folder / DESCRIPTION).is_file()), None)


def located_finetuned(source: str | Path) -> Path:
    """As `find`, also for a name on the hub. Raises ValueError for anything but a fine-tuned model."""
    folder = find(source if Path(source).is_dir() else model_folder(source))
    if folder is None:
        raise ValueError(f"{source}: not a fine-tuned model (no {DESCRIPTION} in it); name OUTPUT/<run>/best")
    return folder

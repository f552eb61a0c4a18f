"""Tasks as data: what their files look like, what is predicted, which figures count. A new one needs no code.

    classify  one label of a set for a text or a pair of texts
    score     one number for a text or a pair of texts
    tag       one label for each word of a sentence
    span      the stretch of a context that answers a question, or that there is none

The presets are GLUE's nine (Wang et al. 2019), with the file layouts its site publishes and the metrics its leader board
shows, SQuAD 1.1 (Rajpurkar et al. 2016) and 2.0 (Rajpurkar et al. 2018), and CoNLL-2003 (Tjong Kim Sang and De Meulder 2003).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["classify", "score", "tag", "span"]
METRICS: dict[str, tuple[str, ...]] = {  # of each kind; larger is better for all of them
    "classify": ("accuracy", "f1", "macro_f1", "matthews"),
    "score": ("pearson", "spearman"),
    "tag": ("f1", "precision", "recall", "accuracy"),  # the first three of entities, accuracy of words
    "span": ("f1", "em", "best_f1"),
}


@dataclass(frozen=True)
class Task:
    """What the files of a task hold and how a prediction is judged. Raises ValueError for a task that cannot be.

    A column of a table is a name in its header, several with | between them (the first that is there counts), or a
    number from 0 in a table without a header. A tag task's columns are numbers; -1 is the last one.
    """

    name: str
    kind: Kind
    text: tuple[str, ...] = ()  # one column, or two for a pair; SQuAD's JSON has none
    label: str = ""
    id: str = ""  # "": examples are numbered from 0
    labels: tuple[str, ...] = ()  # (): those of the training file, sorted; F1 is of the last one
    metrics: tuple[str, ...] = ()  # (): the kind's first; the first one decides about early stopping
    unanswerable: bool = False  # a span's question may have no answer (SQuAD 2.0)
    cut_rows: bool = False  # the published table has rows cut at a tab or line end: they are left out

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"task {self.name}: kind {self.kind!r} is none of {', '.join(get_args(Kind))}")
        if not self.metrics:
            object.__setattr__(self, "metrics", METRICS[self.kind][:1])
        for metric in self.metrics:
            if metric not in METRICS[self.kind]:
                raise ValueError(
                    f"task {self.name}: metric {metric!r} is none of those of {self.kind}: {', '.join(METRICS[self.kind])}"
                )
        if self.kind == "span":
            if self.text or self.label or self.id:
                raise ValueError(f"task {self.name}: its file is SQuAD's JSON, which has no columns to name")
            if "best_f1" in self.metrics and not self.unanswerable:
                raise ValueError(f"task {self.name}: best_f1 is for questions that may have no answer")
            return
        most = 1 if self.kind == "tag" else 2
        if not 1 <= len(self.text) <= most or not all(self.text) or not self.label:
            raise ValueError(
                f"task {self.name}: {self.kind} takes {'one text column' if most == 1 else 'one or two text columns'} "
                "and a label column; name them"
            )
        if self.kind == "tag":
            if self.id:
                raise ValueError(f"task {self.name}: CoNLL columns have no id; sentences are numbered")
            for column in (*self.text, self.label):
                if not column.removeprefix("-").isdecimal():
                    raise ValueError(
                        f"task {self.name}: column {column!r} must be a number (0 is the first, -1 the last)"
                    )
        elif len({c.isdecimal() for c in (*self.text, self.label, *([self.id] * bool(self.id)))}) > 1:
            raise ValueError(f"task {self.name}: give all columns by name or all by number")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"task {self.name}: the labels {', '.join(self.labels)} are not distinct")
        if self.kind == "score" and self.labels:
            raise ValueError(f"task {self.name}: scores a number, so it has no labels")

    @property
    def pair(self) -> bool:
        return len(self.text) == 2


def custom(
    kind: Kind,
    text: Sequence[str] = (),
    label: str = "",
    metrics: Sequence[str] = (),
    id: str = "",
    labels: Sequence[str] = (),
) -> Task:
    """A task of one's own. Tag: token in column 0 and tag in the last one unless told otherwise."""
    if kind == "tag":
        text, label = text or ("0",), label or "-1"
    return Task("custom", kind, tuple(text), label, id, tuple(labels), tuple(metrics))


_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCES = ("sentence1", "sentence2")
_ENTITIES = ("f1", "precision", "recall", "accuracy")


def _pair(
    name: str,
    text: tuple[str, str],
    label: str,
    labels: tuple[str, ...],
    *metrics: str,
    cut_rows: bool = False,
) -> Task:
    return Task(name, "classify", text, label, labels=labels, metrics=metrics, cut_rows=cut_rows)


PRESETS: dict[str, Task] = {
    task.name: task
    for task in (
        # source, label, the author's mark and sentence, without a header
        Task("cola", "classify", ("3",), "1", labels=("0", "1"), metrics=("matthews", "accuracy")),
        Task("sst2", "classify", ("sentence|content",), "label", labels=("0", "1"), metrics=("accuracy",)),
        _pair("mrpc", ("#1 String", "#2 String"), "Quality", ("0", "1"), "f1", "accuracy"),
        Task("stsb", "score", _SENTENCES, "score", metrics=("pearson", "spearman")),
        _pair("qqp", ("question1", "question2"), "is_duplicate", ("0", "1"), "f1", "accuracy", cut_rows=True),
        _pair("mnli", _SENTENCES, "gold_label", ("contradiction", "entailment", "neutral"), "accuracy"),
        _pair("qnli", ("question", "sentence"), "label", _ENTAILMENT, "accuracy"),
        _pair("rte", _SENTENCES, "label", _ENTAILMENT, "accuracy"),
        _pair("wnli", _SENTENCES, "label", ("0", "1"), "accuracy"),
        Task("squad1.1", "span", metrics=("f1", "em")),
        Task("squad2.0", "span", metrics=("f1", "em", "best_f1"), unanswerable=True),
        # token, part of speech, chunk, tag
        Task("conll2003", "tag", ("0",), "3", metrics=_ENTITIES),
    )
}


def preset(name: str) -> Task:
    """The known task of that name. Raises ValueError listing them."""
    if name not in PRESETS:
        raise ValueError(f"no task {name!r}; known are {', '.join(PRESETS)}; or describe one by its columns")
    return PRESETS[name]

"""Tasks as data: what their files look like, what is predicted, which figures count. A new one needs no code.

    classify    one label of a set for a text or a pair of texts
    multilabel  any number of labels of a set for a text or a pair of texts
    ordinal     one label of an ordered set for a text or a pair of texts
    score       one number for a text or a pair of texts
    tag         one label for each word of a sentence
    span        the stretch of a context that answers a question, or that there is none
    choose      which of several continuations or answers belongs to a text
    rank        how well a text answers another one, learned from pairs of a better and a worse one

The presets are GLUE's nine (Wang et al. 2019), with the file layouts its site publishes and the metrics its leader board
shows, SQuAD 1.1 (Rajpurkar et al. 2016) and 2.0 (Rajpurkar et al. 2018), CoNLL-2003 (Tjong Kim Sang and De Meulder 2003), and SWAG
(Zellers et al. 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["classify", "multilabel", "ordinal", "score", "tag", "span", "choose", "rank"]
LABELLED = ("classify", "multilabel", "ordinal", "tag")  # their labels are those of the training file
COMPARED = ("choose", "rank")  # an example is several sequences, which are told from each other
METRICS: dict[str, tuple[str, ...]] = {  # of each kind; larger is better for all of them
    "classify": ("accuracy", "f1", "macro_f1", "matthews"),
    "multilabel": ("micro_f1", "macro_f1", "accuracy"),  # accuracy: all labels of a text are right
    "ordinal": ("kappa", "accuracy", "within_one", "spearman"),  # kappa with quadratic weights
    "score": ("pearson", "spearman"),
    "tag": ("f1", "precision", "recall", "accuracy"),  # the first three of entities, accuracy of words
    "span": ("f1", "em", "best_f1"),
    "choose": ("accuracy",),
    "rank": ("accuracy",),  # pairs in their order
}


@dataclass(frozen=True)
class Task:
    """What the files of a task hold and how a prediction is judged. Raises ValueError for a task that cannot be.

    A column of a table is a name in its header, several with | between them (the first that is there counts), or a
    number from 0 in a table without a header; of JSON lines and Arrow tables also as pre-training's `--text-field` takes it,
    `a.b` inside another one, `a+b` joined. A tag task's columns are numbers, -1 the last one, or names of a table's columns
    of lists.
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
    choices: tuple[str, ...] = ()  # columns that are compared: the possible answers; the better text and the worse one

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
        if self.kind in COMPARED:
            self._check_choices()
            return
        if self.choices:
            raise ValueError(f"task {self.name}: choices are for {' and '.join(COMPARED)}")
        most = 1 if self.kind == "tag" else 2
        if not 1 <= len(self.text) <= most or not all(self.text) or not self.label:
            raise ValueError(
                f"task {self.name}: {self.kind} takes {'one text column' if most == 1 else 'one or two text columns'} "
                "and a label column; name them"
            )
        if self.kind == "tag":
            if self.id:
                raise ValueError(f"task {self.name}: CoNLL columns have no id; sentences are numbered")
            numbers = [column for column in (*self.text, self.label) if column.removeprefix("-").isdecimal()]
            if len(numbers) == 1:
                (name,) = {*self.text, self.label} - {*numbers}
                raise ValueError(
                    f"task {self.name}: column {name!r} must be a number (0 is the first, -1 the last), or both be names "
                    "of a table's columns"
                )
        else:
            self._check_columns()
        self._check_labels()
        if self.kind == "score" and self.labels:
            raise ValueError(f"task {self.name}: scores a number, so it has no labels")

    def _check_choices(self) -> None:
        if self.kind == "choose" and not (1 <= len(self.text) <= 2 and self.label and len(self.choices) >= 2):
            raise ValueError(
                f"task {self.name}: choose takes one or two text columns, two or more choices and a label column; name them"
            )
        if self.kind == "rank" and (len(self.text) > 1 or self.label or self.labels or not self.choices):
            raise ValueError(
                f"task {self.name}: rank takes the columns of the better and the worse text as choices, at most one text "
                "column, and no label"
            )
        if self.labels and len(self.labels) != len(self.choices):
            raise ValueError(f"task {self.name}: {len(self.labels)} labels for {len(self.choices)} choices")
        self._check_columns()
        self._check_labels()

    def _check_columns(self) -> None:
        if len({column.isdecimal() for column in self.columns(labelled=True)}) > 1:
            raise ValueError(f"task {self.name}: give all columns by name or all by number")

    def _check_labels(self) -> None:
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"task {self.name}: the labels {', '.join(self.labels)} are not distinct")

    def columns(self, labelled: bool) -> list[str]:
        """The columns of a table in their order: texts, choices, the label, the id."""
        label = [self.label] if labelled and self.label else []
        return [*self.text, *self.choices, *label, *([self.id] * bool(self.id))]

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
    choices: Sequence[str] = (),
) -> Task:
    """A task of one's own. Tag: token in column 0 and tag in the last one unless told otherwise."""
    if kind == "tag":
        text, label = text or ("0",), label or "-1"
    return Task("custom", kind, tuple(text), label, id, tuple(labels), tuple(metrics), choices=tuple(choices))


_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCES = ("sentence1", "sentence2")
_ENTITIES = ("f1", "precision", "recall", "accuracy")


def _pair(
    name: str, text: tuple[str, str], label: str, labels: tuple[str, ...], *metrics: str, cut_rows: bool = False
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
        # an ending goes on with sent2, after sent1
        Task("swag", "choose", ("sent1", "sent2"), "label", choices=tuple(f"ending{i}" for i in range(4))),
    )
}
LENGTHS = dict.fromkeys(("squad1.1", "squad2.0"), (384, 128))  # tokens of a window, and to the next: Devlin et al. 2019


def preset(name: str) -> Task:
    """The known task of that name. Raises ValueError listing them."""
    if name not in PRESETS:
        raise ValueError(f"no task {name!r}; known are {', '.join(PRESETS)}; or describe one by its columns")
    return PRESETS[name]

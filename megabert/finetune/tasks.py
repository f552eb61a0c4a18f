"""Tasks as data: what their files look like, what is predicted, which metrics count. A new one is an entry of `PRESETS`.

    classify    one label of a set for a text or a pair of texts
    multilabel  any number of labels of a set for a text or a pair of texts
    score       one number for a text or a pair of texts
    tag         one label for each word of a sentence
    span        the span of a context that answers a question, or that there is none
    choose      which of several continuations or answers belongs to a text

The presets are GLUE's nine (Wang et al. 2019), with the file layouts its site publishes and the metrics of its leader board,
SQuAD 1.1 (Rajpurkar et al. 2016) and 2.0 (Rajpurkar et al. 2018), CoNLL-2003 (Tjong Kim Sang and De Meulder 2003), and SWAG
(Zellers et al. 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["classify", "multilabel", "score", "tag", "span", "choose"]
KINDS: tuple[str, ...] = get_args(Kind)
# Kinds whose labels are those of the training file, unless the task names them.
LABELLED = ("classify", "multilabel", "tag")
# Metrics of each kind, the default one first; larger is better for all of them. The accuracy of multilabel is of texts whose labels are
# all correct, that of tag of words; f1, precision and recall of tag are of entities.
METRICS: dict[str, tuple[str, ...]] = {
    "classify": ("accuracy", "f1", "macro_f1", "matthews"),
    "multilabel": ("micro_f1", "macro_f1", "accuracy"),
    "score": ("pearson", "spearman"),
    "tag": ("f1", "precision", "recall", "accuracy"),
    "span": ("f1", "em", "best_f1"),
    "choose": ("accuracy",),
}


@dataclass(frozen=True)
class Task:
    """What the files of a task hold and how a prediction is judged. Raises ValueError for fields that contradict each other.

    A column of a table is a name in its header, several with | between them (the first that exists counts), or a number from 0 in a
    table without a header; of JSON lines and Arrow tables also as pre-training's `--text-field` takes it, `a.b` inside another
    one, `a+b` joined. A tag task's columns are numbers, -1 the last one, or names of a table's columns of lists.
    """

    name: str
    kind: Kind
    # One column, or two for a pair; SQuAD's JSON has none.
    text: tuple[str, ...] = ()
    label: str = ""
    # "": examples are numbered from 0.
    id: str = ""
    # (): the labels of the training file, sorted. F1 is of the last one.
    labels: tuple[str, ...] = ()
    # (): the kind's first one. The first one decides about the best weights.
    metrics: tuple[str, ...] = ()
    # A question may have no answer (SQuAD 2.0).
    unanswerable: bool = False
    # The published table has rows that are cut at a tab or line end; they are left out.
    cut_rows: bool = False
    # Columns of the possible answers of a `choose` task.
    choices: tuple[str, ...] = ()
    # Tokens of a text or window, and from one window to the next, unless a command names others.
    max_length: int = 128
    stride: int = 64

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"task {self.name}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        if not self.metrics:
            object.__setattr__(self, "metrics", METRICS[self.kind][:1])
        for problem in (self._problem_of_metrics(), self._problem_of_columns(), self._problem_of_labels()):
            if problem:
                raise ValueError(f"task {self.name}: {problem}")

    def _problem_of_metrics(self) -> str:
        known = METRICS[self.kind]
        for metric in self.metrics:
            if metric not in known:
                return f"metric {metric!r} is none of those of {self.kind}: {', '.join(known)}"
        if "best_f1" in self.metrics and not self.unanswerable:
            return "best_f1 is for questions that may have no answer"
        return ""

    def _problem_of_columns(self) -> str:
        if self.choices and self.kind != "choose":
            return "choices are for choose"
        if self.kind == "span":
            named = self.text or self.label or self.id
            return "its file is SQuAD's JSON, which has no columns to name" if named else ""
        most = 1 if self.kind == "tag" else 2
        if not (1 <= len(self.text) <= most and all(self.text) and self.label):
            texts = "one text column" if most == 1 else "one or two text columns"
            return f"{self.kind} takes {texts} and a label column; name them"
        if self.kind == "choose" and len(self.choices) < 2:
            return "choose takes the columns of two or more choices; name them"
        if self.kind == "tag":
            return self._problem_of_tag_columns()
        if len({column.isdecimal() for column in self.columns(labelled=True)}) > 1:
            return "give all columns by name or all by number"
        return ""

    def _problem_of_tag_columns(self) -> str:
        if self.id:
            return "CoNLL columns have no id; sentences are numbered"
        names = [column for column in (*self.text, self.label) if not column.removeprefix("-").isdecimal()]
        if len(names) == 1:
            return f"column {names[0]!r} must be a number (0 is the first, -1 the last), or both be names of a table's columns"
        return ""

    def _problem_of_labels(self) -> str:
        if len(set(self.labels)) < len(self.labels):
            return f"the labels {', '.join(self.labels)} are not distinct"
        if self.labels and self.kind == "score":
            return "scores a number, so it has no labels"
        if self.labels and self.kind == "choose" and len(self.labels) != len(self.choices):
            return f"{len(self.labels)} labels for {len(self.choices)} choices"
        return ""

    def columns(self, labelled: bool) -> list[str]:
        """The columns of a table in their order: texts, choices, the label, the id."""
        label = [self.label] if labelled else []
        return [*self.text, *self.choices, *label, *([self.id] if self.id else [])]

    @property
    def pair(self) -> bool:
        return len(self.text) == 2

    @property
    def choice_labels(self) -> tuple[str, ...]:
        """What the choices are called in the label column: as the task says, or by their numbers from 0."""
        return self.labels or tuple(str(number) for number in range(len(self.choices)))


def custom(
    kind: Kind,
    text: Sequence[str] = (),
    label: str = "",
    metrics: Sequence[str] = (),
    id: str = "",
    labels: Sequence[str] = (),
    choices: Sequence[str] = (),
) -> Task:
    """A task of one's own. Without columns a tag task's are 0 for the word and -1 for the tag."""
    if kind == "tag":
        text, label = text or ("0",), label or "-1"
    return Task("custom", kind, tuple(text), label, id, tuple(labels), tuple(metrics), choices=tuple(choices))


_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCES = ("sentence1", "sentence2")

PRESETS: dict[str, Task] = {
    task.name: task
    for task in (
        # CoLA's columns are source, label, the author's mark and the sentence, without a header.
        Task("cola", "classify", ("3",), "1", labels=_BINARY, metrics=("matthews", "accuracy")),
        Task("sst2", "classify", ("sentence|content",), "label", labels=_BINARY),
        Task("mrpc", "classify", ("#1 String", "#2 String"), "Quality", labels=_BINARY, metrics=("f1", "accuracy")),
        Task("stsb", "score", _SENTENCES, "score", metrics=("pearson", "spearman")),
        Task(
            "qqp", "classify", ("question1", "question2"), "is_duplicate", labels=_BINARY, metrics=("f1", "accuracy"),
            cut_rows=True,
        ),
        Task("mnli", "classify", _SENTENCES, "gold_label", labels=("contradiction", "entailment", "neutral")),
        Task("qnli", "classify", ("question", "sentence"), "label", labels=_ENTAILMENT),
        Task("rte", "classify", _SENTENCES, "label", labels=_ENTAILMENT),
        Task("wnli", "classify", _SENTENCES, "label", labels=_BINARY),
        # Lengths of SQuAD: Devlin et al. 2019.
        Task("squad1.1", "span", metrics=("f1", "em"), max_length=384, stride=128),
        Task(
            "squad2.0", "span", metrics=("f1", "em", "best_f1"), unanswerable=True, max_length=384, stride=128,
        ),
        # CoNLL-2003's columns are token, part of speech, chunk and tag.
        Task("conll2003", "tag", ("0",), "3", metrics=METRICS["tag"]),
        # An ending of SWAG continues sent2, which comes after sent1.
        Task("swag", "choose", ("sent1", "sent2"), "label", choices=tuple(f"ending{i}" for i in range(4))),
    )
}  # fmt: skip


def preset(name: str) -> Task:
    """The known task of that name. Raises ValueError listing them."""
    if name not in PRESETS:
        raise ValueError(f"no task {name!r}; known are {', '.join(PRESETS)}; or describe one by its columns")
    return PRESETS[name]

"""Splits of a benchmark's task: what is learned from, what decides (epoch, grid point, threshold), what is reported.

A part that is held out of the training examples is a function of their texts alone: the same whatever the seed, the order
of the file or the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from megabert.finetune import datasets, encoding
from megabert.finetune.benchmark.suites import Entry
from megabert.finetune.examples import Choices, Example, Question, Words

SHARE, MOST = 0.1, 2_000  # of the training examples, and how many at most, that decide
DECIDES = "dev"  # the split that `megabert.finetune.training` takes the best epoch by
ON_TRAIN, ON_DEV = "train", "dev"  # where the split that decides comes from


def groups(example: Example) -> tuple[str, ...]:
    """What examples that must stay together have in common, the larger groups first: the article of a question, then its
    context; the first text of a pair, then both."""
    if isinstance(example, Question):
        article, mark, _ = example.where.partition(".paragraphs[")  # a table's rows name no article
        return (article, example.context) if mark else (example.context,)
    if isinstance(example, Words):
        return (" ".join(example.words),)
    if isinstance(example, Choices):
        whole = "\0".join((example.a or "", *example.options))
        return (example.options[0] if example.a is None else example.a, whole)
    return (example.a,) if example.b is None else (example.a, f"{example.a}\0{example.b}")


def hold_out(
    examples: Sequence[Example], purpose: str, share: float = SHARE, most: int = MOST
) -> tuple[list[Example], list[Example]]:
    """(what is left, what is held out) of `examples`, whole groups each, in their order. Another `purpose` holds out others.

    At most twice what is wanted is held out. Where the larger groups do not come to half of it, the smaller ones are taken.
    Raises ValueError where these are too few for two parts.
    """
    wanted = max(1, min(most, round(share * len(examples))))
    keys = [groups(example) for example in examples]
    for level in range(len(keys[0])):
        held = _draw([key[level] for key in keys], purpose, wanted)
        if 2 * len(held) >= wanted:
            break
    if not held:
        where = examples[0].where.partition(", ")[0]
        raise ValueError(f"{where}: its examples share too few texts, so none can be held out; give more of them")
    parts: tuple[list[Example], list[Example]] = ([], [])
    for number, example in enumerate(examples):
        parts[number in held].append(example)
    return parts


def _draw(keys: Sequence[str], purpose: str, wanted: int) -> set[int]:
    """The numbers of `wanted` examples, or as many more as their groups need: those of one key. At most twice as many, and
    never all."""
    members: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        members.setdefault(key, []).append(number)
    limit = min(2 * wanted, len(keys) - 1)
    held: set[int] = set()
    for key in sorted(members, key=lambda key: hashlib.sha256(f"{purpose}\0{key}".encode()).digest()):
        if len(held) >= wanted:
            break
        if len(held) + len(members[key]) <= limit:
            held.update(members[key])
    return held


def reported(entry: Entry, choose_on: str) -> dict[str, str]:
    """Part of the development data ("" where there is one alone) -> the split that its scores are of."""
    names = {part: f"reported-{part}" if part else "reported" for part in entry.dev or ("",)}
    if choose_on == ON_DEV:
        names[next(iter(names))] = DECIDES
    return names


def read(entry: Entry, choose_on: str) -> tuple[dict[str, list[Example]], tuple[str, ...]]:
    """The examples of "train", of `DECIDES` and of what is reported, and the labels of the training file.

    Errors as of `datasets.read`, `encoding.labels_of` and `hold_out`.
    """
    train = datasets.read(entry.task, entry.train)
    labels = encoding.labels_of(entry.task, train)
    names = reported(entry, choose_on)
    splits = {names[part]: datasets.read(entry.task, path) for part, path in entry.dev.items()}
    if not entry.dev:
        train, splits[names[""]] = hold_out(train, "reported")
    if choose_on == ON_TRAIN:
        train, splits[DECIDES] = hold_out(train, "decides")
    return {"train": train, **splits}, labels

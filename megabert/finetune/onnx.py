"""ONNX files of fine-tuned models: written by PyTorch's exporter, checked in onnxruntime, and in 8 bits.

What is exported is the model as transformers reads it from its Hugging Face folder, so that the inputs and outputs are those
which servers of such folders know: `input_ids`, `attention_mask` and `token_type_ids`, int64 [batch, sequence], and `logits`
fp32 [batch, labels] or [batch, sequence, labels], of a span `start_logits` and `end_logits` [batch, sequence]; of choices the
inputs are [batch, choices, sequence], the logits [batch, choices].
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megabert.data.tokenizer import SPECIAL_TOKENS
from megabert.finetune import datasets, huggingface, metrics
from megabert.finetune.batches import collate
from megabert.finetune.encoding import NO_SPANS, Item
from megabert.finetune.prediction import reshape
from megabert.finetune.save import Described, Finetuned
from megabert.finetune.tasks import COMPARED

FOLDER, WHOLE, QUANTISED = "onnx", "model.onnx", "model_quantized.onnx"  # as the hub's folders name them
TOLERANCE = 1e-4  # of a logit, between onnxruntime and our model
BATCH = 8  # sequences, the short ones padded
INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # the last one where the model reads segments
LIBRARIES = "pip install 'megabert[onnx]'"


@dataclass(frozen=True)
class Written:
    """What became of an export: the largest difference of a logit, and the scores of the labelled file that was named."""

    difference: float
    scores: dict[str, float]  # of model.onnx; empty without a file
    scores_int8: dict[str, float]  # of model_quantized.onnx


def require() -> None:
    """Raises ValueError where a library is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--onnx: {error.name} is not installed; {LIBRARIES}") from None


def write(found: Finetuned, folder: Path, dev: str = "") -> Written:
    """Write `folder`/onnx beside the Hugging Face files in `folder`; with `dev`, a labelled file, in 8 bits too.

    Raises ValueError where onnxruntime's logits are not the model's, or naming what is wrong with `dev`.
    """
    parts = _labelled(found, dev) if dev else None  # a mistake in it is said before the slow work
    place = folder / FOLDER
    place.mkdir()
    with _quiet():
        _export(found.described, folder, place / WHOLE)
        difference = check(found, place / WHOLE)
        if parts is None:
            return Written(difference, {}, {})
        _quantise(place / WHOLE, place / QUANTISED)
    whole, quantised = (_scores(found, place / name, *parts) for name in (WHOLE, QUANTISED))
    return Written(difference, whole, quantised)


def check(found: Finetuned, path: Path) -> float:
    """The largest difference of a logit between the file in onnxruntime and the model, over sequences that fill it, are
    padded and stand alone. Raises ValueError where it is above TOLERANCE."""
    items = probes(found)
    worst = 0.0
    for part in (items, items[-1:]):
        for item, values in zip(part, logits_of(path, found.described, part), strict=True):
            with torch.no_grad():
                reading = collate([item], found.described.layout).reading()
                want = found.module.logits(**reading).numpy()  # type: ignore[arg-type]
            worst = max(worst, float(np.abs(want - values).max()))
    if not worst <= TOLERANCE:
        raise ValueError(
            f"{path.name}: onnxruntime's logits differ from the model's by {worst:.1e}, more than {TOLERANCE:g}; "
            "nothing is written"
        )
    return worst


def probes(found: Finetuned) -> list[Item]:
    """Sequences of random pieces, the first as long as the model reads them."""
    described, draw = found.described, np.random.default_rng(1)
    ordinary = [i for i, piece in enumerate(found.tokenizer.tokens) if piece not in SPECIAL_TOKENS]
    kind, longest = described.task.kind, described.max_length
    items = []
    for length in sorted({longest, longest - 1, max(longest // 2, 6), 7, 6}, reverse=True):
        ids = draw.choice(ordinary, length).astype(np.int32)
        second = length // 2 if kind == "span" or described.task.pair else length
        ids[[0, second - 1, length - 1]] = (found.tokenizer.cls_id, found.tokenizer.sep_id, found.tokenizer.sep_id)
        positions = {"tag": np.arange(1, length - 1), "span": np.append(0, np.arange(second, length - 1))}
        others = ((ids[::-1].copy(), length),) if kind in COMPARED else ()
        read = positions.get(kind, np.zeros(1 + len(others), np.int64))
        items.append(Item(0, ids, second, read, np.zeros(0), NO_SPANS, others))
    return items


def logits_of(path: Path, described: Described, items: Sequence[Item]) -> list[np.ndarray]:
    """fp32 [p, K] of every item in onnxruntime, BATCH items at a time."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = []
    for at in range(0, len(items), BATCH):
        part = items[at : at + BATCH]
        found += at_positions(described, part, session.run(None, padded(described, part)))
    return found


def inputs_of(described: Described) -> tuple[str, ...]:
    """Names of what transformers' class of the model reads."""
    return INPUTS[:2] if described.config.model.modern else INPUTS


def padded(described: Described, items: Sequence[Item]) -> dict[str, np.ndarray]:
    """int64 [sequences, longest] inputs of transformers' classes, by name; of choices [items, choices, longest]."""
    sequences = [sequence for item in items for sequence in item.sequences]
    shape = len(sequences), max(len(ids) for ids, _ in sequences)
    inputs: dict[str, np.ndarray] = {name: np.zeros(shape, np.int64) for name in inputs_of(described)}
    for row, (ids, second) in enumerate(sequences):
        inputs["input_ids"][row, : len(ids)] = ids
        inputs["attention_mask"][row, : len(ids)] = 1
        if "token_type_ids" in inputs:
            inputs["token_type_ids"][row, second : len(ids)] = 1
    if described.task.kind == "choose":
        return {name: values.reshape(len(items), -1, shape[1]) for name, values in inputs.items()}
    return inputs


def at_positions(described: Described, items: Sequence[Item], outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """[p, K] of each item from the outputs of transformers' class for its batch."""
    if described.task.kind == "span":
        start, end = outputs[:2]
        return [np.stack([start[row, i.positions], end[row, i.positions]], -1) for row, i in enumerate(items)]
    if described.task.kind == "tag":
        return [outputs[0][row, item.positions] for row, item in enumerate(items)]
    if described.task.kind == "rank":
        return np.split(outputs[0], np.cumsum([len(item.sequences) for item in items])[:-1])
    if described.task.kind == "choose":
        return list(outputs[0][..., None])
    return [outputs[0][row : row + 1] for row in range(len(items))]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the libraries say of their own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "root")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _export(described: Described, folder: Path, path: Path) -> None:
    import transformers

    kind = getattr(transformers, f"AutoModel{huggingface.class_of(described.task.kind)}")
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = kind.from_pretrained(folder).eval()
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    sizes, names, inputs = [2, 8], ["batch", "sequence"], inputs_of(described)
    if described.task.kind == "choose":
        sizes, names = [2, 3, 8], ["batch", "choices", "sequence"]
    sample = {name: torch.ones(sizes, dtype=torch.int64) for name in inputs}
    sample["attention_mask"][1, ..., 5:] = 0
    most = {"sequence": described.config.model.max_positions}
    dims = {axis: torch.export.Dim(name, max=most.get(name)) for axis, name in enumerate(names)}
    torch.onnx.export(
        model,
        (),
        path,
        kwargs=sample,
        input_names=list(inputs),
        output_names=["start_logits", "end_logits"] if described.task.kind == "span" else ["logits"],
        dynamic_shapes=dict.fromkeys(inputs, dims),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _quantise(path: Path, output: Path) -> None:
    """Weights of the products in int8, activations quantised as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(path, output, weight_type=QuantType.QInt8)


def _labelled(found: Finetuned, dev: str) -> tuple[list[Any], list[Item]]:
    task = found.described.task
    examples = datasets.read(task, dev)
    return examples, found.items(task, examples)


def _scores(found: Finetuned, path: Path, examples: Sequence[Any], items: Sequence[Item]) -> dict[str, float]:
    task, labels = found.described.task, found.described.labels
    logits = [reshape(values, task.kind) for values in logits_of(path, found.described, items)]
    return metrics.score(task, examples, metrics.decode(task, examples, items, logits, labels), labels)

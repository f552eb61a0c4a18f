"""ONNX files of fine-tuned models: written by PyTorch's exporter, checked in onnxruntime, and in 8 bits.

What is exported is the model as transformers reads it from its Hugging Face folder, so that the inputs and outputs are those which
servers of such folders know: `input_ids`, `attention_mask` and `token_type_ids`, int64 [batch, sequence], and `logits` fp32
[batch, labels] or [batch, sequence, labels], of a span `start_logits` and `end_logits` [batch, sequence]; of choices the inputs
are [batch, choices, sequence], the logits [batch, choices].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megabert.data.tokenizer import SPECIAL_TOKENS
from megabert.distributed.ranks import discover
from megabert.finetune import datasets, huggingface, scores
from megabert.finetune.encoding import NO_SPANS, TaskItem
from megabert.finetune.heads import TOKEN_KINDS
from megabert.finetune.prediction import logits_of
from megabert.finetune.save import Described, Finetuned

# As the hub's folders name them.
FOLDER, WHOLE, QUANTISED = "onnx", "model.onnx", "model_quantized.onnx"
# Of a logit, between onnxruntime and our model.
TOLERANCE = 1e-4
# Sequences of a batch in onnxruntime, the short ones padded.
BATCH = 8
# The last one where the model reads segments.
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
LIBRARIES = "pip install 'megabert[onnx]'"


@dataclass(frozen=True)
class OnnxFiles:
    """An export: the largest difference of a logit, and the scores of both files on the labelled file that was named."""

    difference: float
    scores: dict[str, float]
    scores_int8: dict[str, float]

    def about(self) -> str:
        """The section of the model card."""
        text = (
            f"## ONNX\n\n`{FOLDER}/{WHOLE}`: fp32, its logits in onnxruntime within {self.difference:.1e} of the model's, on full, "
            "padded and single sequences."
        )
        if not self.scores_int8:
            return text
        rows = ["| | fp32 | int8 | loss |", "|---|---|---|---|"]
        for name, whole in self.scores.items():
            other = self.scores_int8[name]
            rows.append(f"| {name} | {whole:.4f} | {other:.4f} | {whole - other:+.4f} |")
        return (
            f"{text} `{FOLDER}/{QUANTISED}`: linear layers with weights in 8 bits and activations quantised dynamically; the "
            "scores of both on the labelled file that was named at export:\n\n" + "\n".join(rows)
        )


def require() -> None:
    """Raises ValueError where a library is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--onnx: {error.name} is not installed; {LIBRARIES}") from None


def write(finetuned: Finetuned, folder: Path, dev: str = "") -> OnnxFiles:
    """Write `folder`/onnx beside the Hugging Face files in `folder`; with `dev`, a labelled file, in 8 bits too.

    Raises ValueError where onnxruntime's logits are not the model's, or naming what is wrong with `dev`.
    """
    task = finetuned.described.task
    # A mistake in the file is reported before the slow work.
    examples = datasets.read(task, dev) if dev else []
    items = finetuned.items(task, examples)
    place = folder / FOLDER
    place.mkdir()
    _export(finetuned.described, folder, place / WHOLE)
    difference = check(finetuned, place / WHOLE)
    if not dev:
        return OnnxFiles(difference, {}, {})
    _quantise(place / WHOLE, place / QUANTISED)

    def scores_of(path: Path) -> dict[str, float]:
        labels = finetuned.described.labels
        predictions = scores.decode(task, examples, items, onnx_logits(path, finetuned.described, items), labels)
        return scores.score(task, examples, predictions, labels)

    return OnnxFiles(difference, scores_of(place / WHOLE), scores_of(place / QUANTISED))


def check(finetuned: Finetuned, path: Path) -> float:
    """The largest difference of a logit between the file in onnxruntime and the model, over sequences of full length, padded
    ones and a single one. Raises ValueError where it is above TOLERANCE."""
    items, world = probes(finetuned), discover({})
    worst = 0.0
    for part in (items, items[-1:]):
        want = logits_of(finetuned.module, part, finetuned.described.layout, world)
        pairs = zip(want, onnx_logits(path, finetuned.described, part), strict=True)
        worst = max(worst, *(float(np.abs(a - b).max()) for a, b in pairs))
    if not worst <= TOLERANCE:
        raise ValueError(
            f"{path.name}: onnxruntime's logits differ from the model's by {worst:.1e}, more than {TOLERANCE:g}; "
            "nothing is written"
        )
    return worst


def probes(finetuned: Finetuned) -> list[TaskItem]:
    """Sequences of random tokens, the first as long as the model reads them."""
    described, draw = finetuned.described, np.random.default_rng(1)
    ordinary = [i for i, token in enumerate(finetuned.tokenizer.tokens) if token not in SPECIAL_TOKENS]
    kind, longest = described.task.kind, described.max_length
    items = []
    for length in sorted({longest, longest - 1, max(longest // 2, 6), 7, 6}, reverse=True):
        ids = draw.choice(ordinary, length).astype(np.int32)
        second = length // 2 if kind == "span" or described.task.pair else length
        ids[[0, second - 1, length - 1]] = (
            finetuned.tokenizer.cls_id,
            finetuned.tokenizer.sep_id,
            finetuned.tokenizer.sep_id,
        )
        others = ((ids[::-1].copy(), length),) if kind == "choose" else ()
        positions = {"tag": np.arange(1, length - 1), "span": np.append(0, np.arange(second, length - 1))}
        read = positions.get(kind, np.zeros(1 + len(others), np.int64))
        items.append(TaskItem(0, ids, second, read, np.zeros(0), NO_SPANS, others))
    return items


def onnx_logits(path: Path, described: Described, items: Sequence[TaskItem]) -> list[np.ndarray]:
    """fp32 logits of every item in onnxruntime, BATCH items at a time, as `scores.decode` takes them."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits: list[np.ndarray] = []
    for at in range(0, len(items), BATCH):
        part = items[at : at + BATCH]
        logits += at_positions(described, part, session.run(None, padded(described, part)))
    return logits


def inputs_of(described: Described) -> tuple[str, ...]:
    """Names of what transformers' class of the model reads."""
    return INPUTS[:2] if described.config.model.modern else INPUTS


def padded(described: Described, items: Sequence[TaskItem]) -> dict[str, np.ndarray]:
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


def at_positions(described: Described, items: Sequence[TaskItem], outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The logits of each item, as `scores.decode` takes them, from the outputs of transformers' class for its batch."""
    if described.task.kind not in TOKEN_KINDS:
        return list(outputs[0])
    # start and end of a span are two outputs [batch, sequence].
    logits = np.stack(outputs[:2], -1) if described.task.kind == "span" else outputs[0]
    return [logits[row, item.positions] for row, item in enumerate(items)]


def _export(described: Described, folder: Path, path: Path) -> None:
    import transformers

    kind: Any = getattr(transformers, f"AutoModel{huggingface.HUB_KINDS[described.task.kind].class_of}")
    transformers.utils.logging.disable_progress_bar()
    model = kind.from_pretrained(folder).eval()
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
    """Weights of the linear layers in int8, activations quantised dynamically."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(path, output, weight_type=QuantType.QInt8)

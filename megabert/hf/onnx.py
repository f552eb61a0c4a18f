"""ONNX files of exported models: written by PyTorch's exporter, checked in onnxruntime.

The exported model is transformers', read from the Hugging Face folder, so that inputs and outputs are those that servers expect:
`input_ids`, `attention_mask` and `token_type_ids` (of models with segments), int64 [batch, sequence],
and `logits` fp32 [batch, labels], or [batch, sequence, labels or vocabulary], for a span `start_logits` and `end_logits` [batch,
sequence].
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabert.common.logs import log
from megabert.config import ModelConfig

# Name in the hub's folders.
FOLDER, WHOLE = "onnx", "model.onnx"
# Largest difference of a logit between onnxruntime and transformers' model.
TOLERANCE = 1e-4


def write(
    folder: Path, class_of: str, size: ModelConfig, max_length: int, outputs: Sequence[str] = ("logits",)
) -> None:
    """Write `folder`/onnx beside the Hugging Face files in `folder`, of the model that transformers' `AutoModel` with the ending
    `class_of` reads. Raises ValueError if a logit of onnxruntime, of up to `max_length` tokens, differs from transformers' by more than
    TOLERANCE."""
    import onnxruntime
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a run's next-sentence head has no place in it
    model = getattr(transformers, f"AutoModel{class_of}").from_pretrained(folder).eval()
    place = folder / FOLDER
    place.mkdir()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=size.max_positions)}
    sample = probe(size, 2, 8)
    options: dict[str, Any] = {"dynamic_shapes": dict.fromkeys(sample, dims), "external_data": False, "verbose": False}
    options |= {"input_names": list(sample), "output_names": list(outputs)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own code
        torch.onnx.export(model, (), place / WHOLE, kwargs=sample, dynamo=True, **options)
    session = onnxruntime.InferenceSession(place / WHOLE, providers=["CPUExecutionProvider"])
    largest = []
    for inputs in (probe(size, 3, max_length), probe(size, 1, 6)):
        found = session.run(None, {name: values.numpy() for name, values in inputs.items()})
        with torch.no_grad():
            wanted = model(**inputs).to_tuple()
        mask = inputs["attention_mask"].bool()
        for want, got in zip(wanted, map(torch.from_numpy, found), strict=True):
            # of tokens without the padding
            differences = (want - got).abs()
            largest.append((differences[mask] if want.shape[:2] == mask.shape else differences).max())
    worst = float(torch.stack(largest).max())  # NaN if one is
    if not worst <= TOLERANCE:
        raise ValueError(
            f"{WHOLE}: onnxruntime's logits differ from the model's by {worst:.1e}, more than {TOLERANCE:g}"
        )
    log.info(f"{FOLDER}/{WHOLE}: logits within {worst:.1e} of the model's")


def probe(size: ModelConfig, batch: int, length: int) -> dict[str, Tensor]:
    """int64 [batch, length] inputs by name: random tokens, half of each as a second segment, all but the first padded."""
    ids = torch.randint(5, size.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, length // 2 + 1 :] = 0
    segments = torch.ones_like(ids)
    segments[:, : length // 2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs | {"token_type_ids": segments} if size.segmented else inputs

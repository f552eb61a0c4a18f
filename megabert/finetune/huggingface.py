"""Fine-tuned models as Hugging Face folders: config, weights and tokenizer, which load without any code of ours.

A text is read at [CLS] through the pooler, words and answers at their own tokens, as transformers' classes of these names
do; a pre-LN model becomes the MegatronBert class of the same kind, a modern one the ModernBert class. What these classes have not is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megabert.common.files import write_tensors
from megabert.finetune import save
from megabert.finetune.save import Described, Finetuned
from megabert.hf import hf_modern, hf_names, hf_tokenizer

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TEXTS = "ForSequenceClassification"
CLASSES = {  # of the kinds that are not TEXTS
    "tag": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "choose": "ForMultipleChoice",
}
PROBLEMS = {  # by which a pipeline reads logits
    "classify": "single_label_classification",
    "multilabel": "multi_label_classification",
    "ordinal": "multi_label_classification",
    "score": "regression",
    "rank": "regression",
}
HEAD_NAMES = {"span": "qa_outputs"}  # of the added layer; of the other kinds `classifier`
SCORE = "score"  # the name a pipeline gives a number


def load(source: str | Path) -> Finetuned:
    """The fine-tuned model that is to be exported, in fp32 on the CPU.

    Raises ValueError naming what is damaged, or what Hugging Face's BERT has not.
    """
    found = save.load(source, torch.device("cpu"), "fp32")
    described = found.described
    missing = ""
    if described.shape.head == "bilstm":
        missing = "BiLSTM head (--head bilstm); fine-tune with --head linear"
    elif described.config.data.masking.causal:
        missing = "left-to-right encoder (data.masking.strategy=causal) under this head; start from a masked model"
    if missing:
        raise ValueError(f"{found.folder}: Hugging Face's BERT has no {missing}")
    return found


def class_of(kind: str) -> str:
    """The end of the names of the classes that hold a task of this kind."""
    return CLASSES.get(kind, TEXTS)


def architecture(described: Described) -> str:
    """The class of transformers that holds the model."""
    return hf_names.class_of(described.config.model) + class_of(described.task.kind)


def names(described: Described) -> tuple[str, ...]:
    """What a pipeline calls the outputs; () for a span and for choices. Of an ordered set they are decisions between two."""
    if described.task.kind in ("score", "rank"):
        return (SCORE,)
    if described.task.kind == "ordinal":
        return tuple(f"above {label}" for label in described.labels[:-1])
    return () if described.task.kind == "choose" else described.labels


def config(described: Described) -> dict[str, Any]:
    """The `config.json`."""
    tree = hf_names.to_huggingface_config(described.config.model)
    tree["architectures"] = [architecture(described)]
    if called := names(described):
        tree["id2label"] = {str(i): name for i, name in enumerate(called)}
        tree["label2id"] = {name: i for i, name in enumerate(called)}
    if described.config.model.modern:
        tree["classifier_dropout"] = described.config.model.dropout
    if described.task.kind in PROBLEMS:
        tree["problem_type"] = PROBLEMS[described.task.kind]
    return tree


def weights(found: Finetuned) -> dict[str, Tensor]:
    """fp32 weights under transformers' names. Raises ValueError naming a tensor that is missing or left over."""
    saved = load_file(found.folder / save.WEIGHTS)
    encoder, head = (
        {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
        for prefix in ("encoder.", "head.")
    )
    renamed = hf_names.encoder_to_huggingface(encoder, found.described.config.model)
    modern = found.described.config.model.modern
    added = "classifier" if modern else HEAD_NAMES.get(found.described.task.kind, "classifier")
    for name, tensor in head.items():
        part, _, which = name.rpartition(".")
        if part == "transform":
            renamed[hf_modern.HEAD[f"mlm.{which}"]] = tensor
        else:
            renamed[f"{'bert.pooler.dense' if part == 'pooler' else added}.{which}"] = tensor
    return renamed


def write(found: Finetuned, folder: Path) -> None:
    """Everything but the card."""
    files = hf_tokenizer.files(found.tokenizer, found.described.max_length, not found.described.config.model.modern)
    files[CONFIG] = hf_tokenizer.as_json(config(found.described))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    write_tensors(folder / WEIGHTS, weights(found), {"format": "pt"})

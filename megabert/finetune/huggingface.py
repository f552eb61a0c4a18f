"""Fine-tuned models as Hugging Face folders: config, weights, tokenizer and model card, which load without this package.

A text is read at [CLS] through the pooler, words and answers at their tokens, as in transformers' classes. A pre-LN model becomes
the MegatronBert class of the same kind, a modern one the ModernBert class, a nomic one the NomicBert class. Features that these
classes lack are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megabert.common.files import write_tensors
from megabert.common.run_files import CONFIG
from megabert.finetune import save
from megabert.finetune.heads import TOKEN_KINDS
from megabert.finetune.save import Described, Finetuned
from megabert.finetune.scores import log_odds
from megabert.hf import mapping, tokenizer_folder
from megabert.hf.model_card import page


def load(source: str | Path) -> Finetuned:
    """The fine-tuned model to export, in fp32 on the CPU.

    Raises ValueError naming what is damaged, or a feature that Hugging Face's BERT lacks.
    """
    finetuned = save.load(source, torch.device("cpu"), "fp32")
    described, folder = finetuned.described, finetuned.folder
    if described.config.data.masking.causal:
        missing = "causal encoder (data.masking.strategy=causal) under this head; start from a masked model"
        raise ValueError(f"{folder}: Hugging Face's BERT has no {missing}")
    if described.layers != "last":
        raise ValueError(
            f"{folder}: its added layer reads --layers {described.layers}, Hugging Face's classes the last one; train with --layers last, "
            "or predict with megabert finetune --predict"
        )
    # Its dropout is that of fine-tuning, which EuroBERT's classes lack.
    family = mapping.find_family(described.config.model.model_copy(update={"dropout": 0.0}))
    kind = family.prefix + HUB_KINDS[described.task.kind].class_of
    if not family.text_layer:
        raise ValueError(f"{folder}: Hugging Face's {kind} has other layers behind its encoder than ours")
    if described.task.kind == "span" and not family.spans:
        raise ValueError(f"{folder}: Hugging Face has no {kind}")
    return finetuned


@dataclass(frozen=True)
class HubKind:
    """Names of the models of a kind in transformers and on the hub."""

    # The hub's task, and the end of the names of transformers' classes.
    task: str = "text-classification"
    class_of: str = "ForSequenceClassification"
    # Entries of config.json that tell a pipeline how to read the logits.
    config: dict[str, Any] = field(default_factory=dict)
    # Name of the added layer in a BERT.
    layer: str = "classifier"


HUB_KINDS = {
    "classify": HubKind(config={"problem_type": "single_label_classification"}),
    "multilabel": HubKind(config={"problem_type": "multi_label_classification"}),
    "score": HubKind(config={"problem_type": "regression"}),
    "tag": HubKind("token-classification", "ForTokenClassification"),
    "span": HubKind("question-answering", "ForQuestionAnswering", layer="qa_outputs"),
}


def architecture(described: Described) -> str:
    """The class of transformers that holds the model."""
    return mapping.find_family(described.config.model).prefix + HUB_KINDS[described.task.kind].class_of


def config(described: Described, ids: Mapping[str, int]) -> dict[str, Any]:
    """The `config.json`; `ids`: the tokenizer's special ids."""
    tree = mapping.to_huggingface_config(described.config.model, ids=ids)
    tree["architectures"] = [architecture(described)]
    # A pipeline's names of the outputs; a span's have none.
    if called := ("score",) if described.task.kind == "score" else described.labels:
        tree["id2label"] = {str(i): name for i, name in enumerate(called)}
        tree["label2id"] = {name: i for i, name in enumerate(called)}
    if described.config.model.modern:
        tree["classifier_dropout"] = described.config.model.dropout
    return tree | HUB_KINDS[described.task.kind].config


def weights(finetuned: Finetuned) -> dict[str, Tensor]:
    """fp32 weights under transformers' names, whose bias has the threshold, so that it is a half there. Raises ValueError naming a
    missing or unused tensor."""
    saved = load_file(finetuned.folder / save.WEIGHTS)
    saved["head.output.bias"][1:2] -= log_odds(finetuned.described.threshold)
    encoder, head = (
        {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
        for prefix in ("encoder.", "head.")
    )
    model = finetuned.described.config.model
    renamed = mapping.to_huggingface(encoder, model, heads=False)
    kind, family = finetuned.described.task.kind, mapping.find_family(model)
    added = family.text_layer if model.modern or kind not in TOKEN_KINDS else HUB_KINDS[kind].layer
    for name, tensor in head.items():
        part, _, which = name.rpartition(".")
        if part == "transform":
            renamed[family.head[f"mlm.{which}"]] = tensor
        else:
            renamed[f"{family.pooler if part == 'pooler' else added}.{which}"] = tensor
    return renamed


def write(finetuned: Finetuned, folder: Path) -> None:
    """Write everything but the card."""
    tokenizer, described = finetuned.tokenizer, finetuned.described
    segmented, separators = described.config.model.segmented, described.separators
    files = tokenizer_folder.files(tokenizer, described.max_length, segmented, separators)
    files[CONFIG] = tokenizer_folder.as_json(config(described, tokenizer.special_ids))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    write_tensors(folder / save.WEIGHTS, weights(finetuned), {"format": "pt"})


PIPELINE = """from transformers import pipeline
print(pipeline("text-classification", {name})({text}, truncation=True, top_k=None))"""
MODEL = """from transformers import AutoModel{of}, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({name}), AutoModel{of}.from_pretrained({name})"""


def card(finetuned: Finetuned, name: str) -> str:
    """The README.md of an exported fine-tuned model."""
    described, task, results = finetuned.described, finetuned.described.task, finetuned.results
    model = described.config.model
    kind = HUB_KINDS[task.kind]
    text = '{"text": "A text.", "text_pair": "Its second."}' if task.pair else '["A text."]'
    code = MODEL if task.kind in TOKEN_KINDS else PIPELINE
    code = code.format(name=json.dumps(name, ensure_ascii=False), text=text, of=kind.class_of)
    about = f"A BERT fine-tuned with MegaBERT on `{task.name}`; it is transformers' `{architecture(described)}`."
    labels = ", ".join(f"`{label}`" for label in described.labels) or "none"
    shape: dict[str, Any] = {"kind": task.kind, "labels": labels}
    shape |= {"layers, width, heads": f"{model.layers}, {model.hidden}, {model.heads}"}
    shape |= {"max_length": described.max_length, "tokenizer SHA-256": finetuned.tokenizer.sha256}
    if described.threshold != 0.5:
        above = f"where its probability in training's terms is above {described.threshold:.6g}, here above a half"
        shape["threshold"] = f"`{described.labels[1]}` {above} (the bias differs)"
    scores = {metric: f"{value:.4f}" for metric, value in results.get("dev", {}).items()}
    tables = {
        "Settings": results.get("settings", {}) | shape,
        "Scores, on the file that chose these weights": scores or {"scores": "not measured"},
    }
    return page(kind.task, name, about, code, tables)

"""Compatibility of a checkpoint with a run: data, tokenizer, model and global batch must be those it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fields of the config that decide what the weights and moments mean, and which rows an update holds.
FIXED = ("model", "batch.global_size", "optimizer.name", "precision", "seed")
FREE = ("dropout", "attention_dropout", "activation_checkpointing", "zero_init", "frequency_bias")  # may change
LATER = {
    "activation": "gelu",
    "tied": True,
}  # fields of the model that some checkpoints, or the configs of today, lack, and what they are there


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to continue a run on other data or as another model.

    Both hold "dataset", "tokenizer" (SHA-256) and "config", of a student also "teacher" (SHA-256 of its weights). Raises
    ValueError naming the field and both values.
    """
    for key, what in (("dataset", "dataset fingerprint"), ("tokenizer", "tokenizer SHA-256")):
        _refuse(what, saved[key], current[key])
    _refuse("distill.teacher's weights (SHA-256)", saved.get("teacher"), current.get("teacher"))
    for name in FIXED:
        old, new = _at(saved["config"], name), _at(current["config"], name)
        if isinstance(old, dict):
            old, new = LATER | old, LATER | new
            for field in sorted(old.keys() | new.keys()):
                if field not in FREE:
                    _refuse(f"{name}.{field}", old.get(field), new.get(field))
        else:
            _refuse(name, old, new)
    name = "data.masking.strategy"  # may change in a run, but a left-to-right model is another kind of model
    old, new = _at(saved["config"], name), _at(current["config"], name)
    if "causal" in (old, new):
        _refuse(name, old, new)


def _at(tree: Mapping[str, Any], name: str) -> Any:
    node: Any = tree
    for part in name.split("."):
        node = node[part]
    return node


def _refuse(field: str, saved: Any, current: Any) -> None:
    if saved != current:
        raise ValueError(
            f"cannot resume: {field} is {current!r} but the checkpoint was made with {saved!r}; "
            "set it back or name a new run folder"
        )

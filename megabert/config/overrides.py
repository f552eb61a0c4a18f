"""`section.key=value` overrides, read as the type their field has, and the refusal of unknown keys by the nearest known one."""

from __future__ import annotations

import difflib
import tomllib
from typing import Any

from pydantic import BaseModel


def set_override(model: type[BaseModel], tree: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into `tree`, read as the type that `model` has there. Raises ValueError."""
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ValueError(f"override {override!r}: write section.key=value")
    *parents, leaf = key.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ValueError(f"override {override!r}: {part} is not a section")
    node[leaf] = parse_value(text, _field_type(model, key))


def _field_type(model: Any, key: str) -> Any:
    for part in key.split("."):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return None  # unknown: reported with its nearest match when the tree is checked
        model = field.annotation
    return model


def parse_value(text: str, kind: Any = None) -> Any:
    """What stands behind `=`: as TOML says it, or a bare word; where `kind` is str, the text as it is."""
    if kind is str:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def refuse_unknown(model: Any, tree: dict[str, Any], prefix: str = "", root: Any = None) -> None:
    """Raises ValueError for the first key of `tree` that `model` does not have, with the nearest name there is."""
    for key, value in tree.items():
        field = model.model_fields.get(key)
        if field is None:
            near = difflib.get_close_matches(key, model.model_fields, n=1) or _anywhere(root or model, key)
            hint = f"; did you mean {prefix + near[0] if near[0] in model.model_fields else near[0]}?" if near else ""
            raise ValueError(f"unknown config key {prefix}{key}{hint}")
        if isinstance(value, dict) and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            refuse_unknown(field.annotation, value, f"{prefix}{key}.", root or model)


def _anywhere(root: Any, key: str) -> list[str]:
    """Full names whose last part is close to `key`: catches a key set in the wrong section."""
    names: dict[str, str] = {}
    stack: list[tuple[Any, str]] = [(root, "")]
    while stack:
        model, prefix = stack.pop()
        for name, field in model.model_fields.items():
            names[name] = prefix + name
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                stack.append((field.annotation, f"{prefix}{name}."))
    return [names[match] for match in difflib.get_close_matches(key, names, n=1)]

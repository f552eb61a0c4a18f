"""Model card of an exported model: its config keys, metrics from the run's files, and "not measured" for the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabert.checkpoint import flatten_settings
from megabert.common.logs import duration
from megabert.common.run_files import METRICS, json_lines
from megabert.config import changed, flat
from megabert.hf.read import Pretrained

UNKNOWN = "not measured"
SHOWN_METRICS = {
    "eval/mlm_loss": "{} loss, held out",
    "eval/perplexity": "{} perplexity, held out",
    "eval/mlm_accuracy": "{} accuracy, held out",
    "eval/nsp_accuracy": "next-sentence accuracy, held out",
    "perf/tokens_per_sec": "training speed, real tokens/s",
    "perf/mfu": "model FLOPs utilisation",
}
FILL = """from transformers import pipeline
print(pipeline("fill-mask", {name})("The capital of France is [MASK]."))"""
CONTINUE = """from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained({name}) for kind in (AutoTokenizer, AutoModelForCausalLM))
ids = tokenizer("The capital of France is", return_tensors="pt").input_ids[:, :-1]  # without [SEP], which ends a text
print(tokenizer.decode(model.generate(ids, max_new_tokens=5)[0]))"""


def page(task: str, name: str, about: str, example: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A README.md: the hub's `task`, a paragraph, Python code, and values by name under each title."""
    head = f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- bert\n- megabert\n---\n\n# {name}"
    parts = [head, about, f"```python\n{example}\n```"]
    for title, rows in tables.items():
        lines = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def render(pretrained: Pretrained, name: str, architecture: str) -> str:
    """The README.md of an exported model; `architecture` is the class of transformers that holds all of it."""
    task, example = ("text-generation", CONTINUE) if pretrained.config.data.masking.causal else ("fill-mask", FILL)
    about = f"A BERT pre-trained with MegaBERT; all of its weights are in transformers' `{architecture}`."
    tables = {"Settings": recipe(pretrained), "Metrics": metrics(pretrained) | {"GLUE, SQuAD, social bias": UNKNOWN}}
    tokenizer = pretrained.tokenizer
    example = example.format(name=json.dumps(name, ensure_ascii=False)).replace(
        "[MASK]", tokenizer.tokens[tokenizer.mask_id]
    )
    return page(task, name, about, example, tables)


def recipe(pretrained: Pretrained) -> dict[str, Any]:
    """How a model was trained: the model's config keys and those that differ from the defaults, paths by their last name."""
    config, state = pretrained.config, pretrained.state
    keys = flatten_settings(flat({"model": config.model.model_dump()}) | changed(config.model_dump()))
    rows = {key: Path(value).name if isinstance(value, str) else value for key, value in keys.items()}
    rows = {key: value for key, value in rows.items() if not re.match(r"(phases\.\d+\.)?data\.(path|mix)", key)}
    names = {"dataset": "dataset fingerprint", "revision": "revision", "config_sha256": "config SHA-256"}
    rows |= {shown: state.get(key, "unknown") for key, shown in names.items()}
    updates = f"{pretrained.step:,}" + ", then changed outside of its run" * pretrained.changed
    return {"updates": updates} | rows | {"tokenizer SHA-256": pretrained.tokenizer.sha256}


def metrics(pretrained: Pretrained) -> dict[str, Any]:
    """Metrics that its run measured up to its checkpoint, or "not measured", as of weights that were changed since."""
    seconds = pretrained.state.get("seconds")
    rows: dict[str, Any] = {"training time": duration(seconds) if seconds else UNKNOWN}
    newest: dict[str, tuple[int, Any]] = {}
    for entry in () if pretrained.changed else json_lines(pretrained.run_dir / METRICS):
        if entry["step"] <= pretrained.step:
            newest |= {key: (entry["step"], value) for key, value in entry.items() if isinstance(value, int | float)}
    model = "next-token" if pretrained.config.data.masking.causal else "masked-LM"
    for key, shown in SHOWN_METRICS.items():
        if "nsp" not in key or pretrained.config.model.nsp:
            step, value = newest.get(key, (0, None))
            rows[shown.format(model)] = UNKNOWN if value is None else f"{value:.4g} (update {step:,})"
    return rows

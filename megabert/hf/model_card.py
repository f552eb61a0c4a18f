"""Model card of an exported model: figures from the run's files, and "not measured" for the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabert.common.logs import duration
from megabert.common.run_files import METRICS
from megabert.data.shards import Manifest
from megabert.hf.read import Pretrained

UNKNOWN = "not measured"
FIGURES = {
    "eval/mlm_loss": "{} loss, held out",
    "eval/perplexity": "{} perplexity, held out",
    "eval/mlm_accuracy": "{} accuracy, held out",
    "eval/nsp_accuracy": "next-sentence accuracy, held out",
    "perf/tokens_per_sec": "training speed, real tokens/s",
    "perf/mfu": "model FLOPs utilisation",
}
FILL = """```python
from transformers import pipeline
print(pipeline("fill-mask", "{name}")("The capital of France is [MASK]."))
```"""
CONTINUE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained("{name}") for kind in (AutoTokenizer, AutoModelForCausalLM))
ids = tokenizer("The capital of France is", return_tensors="pt").input_ids[:, :-1]  # without [SEP], which ends a text
print(tokenizer.decode(model.generate(ids, max_new_tokens=5)[0]))
```"""


def render(pretrained: Pretrained, name: str, architecture: str) -> str:
    """The README.md of an exported model; `architecture` is the class of transformers that holds all of it."""
    cfg, model = pretrained.config, pretrained.config.model
    causal, distill = cfg.data.masking.causal, cfg.distill
    task, peer, example = ("fill-mask", "AutoModelForMaskedLM", FILL)
    if causal:
        task, peer, example = ("text-generation", "AutoModelForCausalLM", CONTINUE)
    shape = {
        "layers, width, heads, feed-forward width": f"{model.layers}, {model.hidden}, {model.heads}, {model.ffn}",
        "layer norms": "after each block" if model.norm == "post" else "before each block",
        "positions": f"{model.max_positions}, {'rotary' if model.modern else 'learned'}",
        "feed-forward": "gated GELU" if model.modern else "GELU",
        "vocabulary": f"{model.vocab_size:,} tokens, {pretrained.tokenizer.kind}",
        "next-sentence head": "yes" if model.nsp else "none",
        "attention": "causal" if causal else "bidirectional",
    }
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- bert\n- megabert\n---\n\n# {name}",
        f"A BERT pre-trained with MegaBERT, {pretrained.step:,} updates. All of its weights are in transformers' "
        f"`{architecture}`; `AutoModel` and `{peer}` load their parts of them and name the rest.",
        f"Distilled from `{Path(distill.teacher).name}`: soft targets at temperature {distill.temperature:g} (weight "
        f"{distill.soft:g}), the language model's own loss ({distill.mlm:g}), cosine of the last hidden states "
        f"({distill.cosine:g})."
        if distill.teacher
        else "",
        example.format(name=name),
        f"## Model\n\n{table(shape)}",
        f"## Corpus\n\n{table(_corpus(pretrained))}",
        f"## Recipe\n\n{table(recipe(pretrained))}",
        f"## Figures\n\n{table(figures(pretrained) | {'GLUE, SQuAD and other tasks': UNKNOWN, 'social bias': UNKNOWN})}",
        f"Written from the run's own files, at revision {pretrained.state.get('revision', 'unknown')}. Any setting that is "
        f"not here is in the run's config, SHA-256 {pretrained.state.get('config_sha256', 'unknown')}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _corpus(pretrained: Pretrained) -> dict[str, Any]:
    fingerprint = pretrained.state.get("dataset", "unknown")
    rows: dict[str, Any] = {"dataset fingerprint": fingerprint, "tokenizer SHA-256": pretrained.tokenizer.sha256}
    try:
        manifest = Manifest.load(pretrained.config.data.path)
    except (ValueError, OSError):
        manifest = None
    if manifest is None or manifest.fingerprint != fingerprint:
        return rows | {"text": "unknown: the dataset is not at the run's path"}
    units = {
        "documents": "documents",
        "sentences": "sentences",
        "corpus_tokens": "tokens",
        "text_bytes": "bytes of text",
    }
    rows |= {shown: f"{manifest.statistics[key]:,}" for key, shown in units.items() if key in manifest.statistics}
    return rows | {"row length": manifest.seq_len, "rows": f"{manifest.rows:,}"}


def recipe(pretrained: Pretrained) -> dict[str, Any]:
    """How a model was trained: values by name."""
    cfg = pretrained.config
    if not pretrained.step:
        return {"updates": "none"}
    masking, optimizer, schedule = cfg.data.masking, cfg.optimizer, cfg.schedule
    rate = f"{masking.rate:.0%}" + (f" to {masking.final_rate:.0%}" if masking.final_rate else "")
    shown = f"{rate} of the tokens, {masking.mask:.0%} masked, {masking.random:.0%} random"
    if share := cfg.objective.causal_share:
        shown = f"causal for the first {share:.0%} of the budget, then {shown}"
    start = "random weights"
    if source := cfg.init_from or cfg.distill.teacher:
        start = f"the weights of {Path(source).name}"
    length, warmup = f" of {schedule.total_steps:,}", f"{schedule.warmup_steps:,} updates"
    if schedule.unit != "steps":
        unit = f"{schedule.budget_minutes:g} minutes"
        if schedule.unit == "tokens":
            unit = f"{schedule.budget_tokens:,} tokens"
        length, warmup = "", f"{schedule.budget_warmup:.0%} of {unit}"
    return {
        "started from": start,
        "updates": f"{pretrained.step:,}{length}",
        "rows an update": cfg.batch.global_size,
        "optimizer": f"{optimizer.name}, learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, "
        f"beta {optimizer.beta1:g} and {optimizer.beta2:g}, clip {optimizer.clip:g}",
        "schedule": f"{schedule.name}, warm-up {warmup}",
        "masking": "none: each token is predicted from those before it" if masking.causal else shown,
        "dropout": f"{cfg.model.dropout:g}, attention {cfg.model.attention_dropout:g}",
        "precision": cfg.precision,
        "seed": cfg.seed,
    }


def figures(pretrained: Pretrained) -> dict[str, Any]:
    """Figures that its run measured up to its checkpoint, or "not measured"."""
    seconds = pretrained.state.get("seconds")
    rows: dict[str, Any] = {"training time": duration(seconds) if seconds else UNKNOWN}
    newest: dict[str, tuple[int, Any]] = {}
    path = pretrained.run_dir / METRICS
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            # cut by a kill
            continue
        if entry["step"] <= pretrained.step:
            newest |= {key: (entry["step"], value) for key, value in entry.items() if isinstance(value, int | float)}
    model = "next-token" if pretrained.config.data.masking.causal else "masked-LM"
    for key, shown in FIGURES.items():
        if "nsp" not in key or pretrained.config.model.nsp:
            step, value = newest.get(key, (0, None))
            rows[shown.format(model)] = UNKNOWN if value is None else f"{value:.4g} (update {step:,})"
    return rows


def table(rows: Mapping[str, Any]) -> str:
    """A Markdown table of values by name."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])

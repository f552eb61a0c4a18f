"""Model card of an exported model: figures from the run's files, and "not measured" for the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabert.common.logs import duration
from megabert.hf import Pretrained, manifest_of

UNKNOWN = "not measured"
EVALUATED = {
    "eval/mlm_loss": "masked-LM loss",
    "eval/perplexity": "masked-LM perplexity",
    "eval/mlm_accuracy": "masked-LM accuracy",
    "eval/nsp_loss": "next-sentence loss",
    "eval/nsp_accuracy": "next-sentence accuracy",
}
EVALUATED_CAUSAL = {
    "eval/mlm_loss": "next-token loss",
    "eval/perplexity": "next-token perplexity",
    "eval/mlm_accuracy": "next-token accuracy",
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
TRAINED = {"perf/tokens_per_sec": "training speed, real tokens/s", "perf/mfu": "model FLOPs utilisation"}


def render(pretrained: Pretrained, name: str, architecture: str) -> str:
    """The README.md of an exported model; `architecture` is the class of transformers that holds all of it."""
    cfg, model = pretrained.config, pretrained.config.model
    causal = cfg.data.masking.causal
    task, peer, example = ("fill-mask", "AutoModelForMaskedLM", FILL)
    if causal:
        task, peer, example = ("text-generation", "AutoModelForCausalLM", CONTINUE)
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- bert\n- megabert\n---",
        f"# {name}",
        f"A BERT pre-trained with MegaBERT, {pretrained.step:,} updates. All of its weights are in transformers' "
        f"`{architecture}`; `AutoModel` and `{peer}` load their parts of them and name the rest.",
        example.format(name=name),
        "## Model",
        table(
            {
                "layers, width, heads, feed-forward width": f"{model.layers}, {model.hidden}, {model.heads}, {model.ffn}",
                "layer norms": "after each block" if model.norm == "post" else "before each block",
                "positions": f"{model.max_positions}, {'rotary' if model.modern else 'learned'}",
                "feed-forward": "gated GELU" if model.modern else "GELU",
                "vocabulary": f"{model.vocab_size:,} tokens, {pretrained.tokenizer.kind}",
                "tokenizer SHA-256": pretrained.tokenizer.sha256,
                "next-sentence head": "yes" if model.nsp else "none",
                "attention": "causal" if causal else "bidirectional",
            }
        ),
        "## Corpus",
        table(_corpus(pretrained)),
        "## Recipe",
        table(recipe(pretrained)),
        "## Figures",
        table(figures(pretrained) | {"GLUE, SQuAD and other tasks": UNKNOWN, "social bias": UNKNOWN}),
        f"Written from the run's own files; versions: {_versions(pretrained.state)}. Any setting that is not here is in "
        f"the run's config, SHA-256 {pretrained.state.get('config_sha256', 'unknown')}.",
    ]
    if cfg.distill.teacher:
        d = cfg.distill
        parts.insert(
            3,
            f"Distilled from `{Path(d.teacher).name}`: soft targets at temperature {d.temperature:g} (weight {d.soft:g}), "
            f"the language model's own loss ({d.mlm:g}), cosine of the last hidden states ({d.cosine:g}).",
        )
    return "\n\n".join(parts) + "\n"


def _corpus(pretrained: Pretrained) -> dict[str, Any]:
    rows: dict[str, Any] = {"dataset fingerprint": pretrained.state.get("dataset", "unknown")}
    manifest = manifest_of(pretrained)
    if manifest is None:
        return rows | {"text": "unknown: the dataset is not at the run's path"}
    statistics = manifest.statistics
    units = {"documents": "documents", "sentences": "sentences", "corpus_tokens": "tokens"}
    rows |= {shown: f"{statistics[key]:,}" for key, shown in units.items() if key in statistics}
    if "text_bytes" in statistics:
        rows["text, MB"] = f"{statistics['text_bytes'] / 1e6:,.1f}"
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
    """Figures that its run measured, or "not measured"."""
    seconds = pretrained.state.get("seconds")
    rows: dict[str, Any] = {"training time": duration(seconds) if seconds else UNKNOWN}
    entries = _entries(pretrained.run_dir / "metrics.jsonl", pretrained.step)
    evaluated = EVALUATED_CAUSAL if pretrained.config.data.masking.causal else EVALUATED
    for names, where in ((evaluated, "held out"), (TRAINED, "")):
        for key, shown in names.items():
            if "nsp" in key and not pretrained.config.model.nsp:
                continue
            entry = next((entry for entry in reversed(entries) if key in entry), None)
            label = ", ".join(part for part in (shown, where) if part)
            at = f" (update {entry['step']:,})" if entry else ""
            rows[label] = f"{entry[key]:.4g}{at}" if entry else UNKNOWN
    return rows


def _entries(path: Path, last: int) -> list[dict[str, Any]]:
    """The run's logged figures up to update `last`; damaged lines are left out."""
    entries = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and entry["step"] <= last:
            entries.append({k: v for k, v in entry.items() if isinstance(v, int | float)})
    return entries


def _versions(state: dict[str, Any]) -> str:
    versions = {"megabert": state.get("revision", "unknown")} | state.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def table(rows: Mapping[str, Any]) -> str:
    """A Markdown table of values by name."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])

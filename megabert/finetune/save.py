"""Saved fine-tuned models: a folder with the encoder and its added layer, the task it was trained for, and the tokenizer.

    model.safetensors   fp32 weights, `encoder.…` (BertForPreTraining's names) and `head.…`
    task.json           the task, its labels, how texts are encoded, the model's config
    tokenizer.model     or vocab.txt, tokenizer.json

Nothing in it is unpickled, and it is written atomically.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megabert import config as configuration
from megabert.checkpoint import refuse_non_finite
from megabert.common.files import atomic_folder, canonical, refuse_newer, write_tensors
from megabert.config import Config, DataConfig, OpsConfig
from megabert.data.tokenizer import Tokenizer
from megabert.engine.precision import DTYPES, dtype_on
from megabert.finetune import heads
from megabert.finetune.batches import ItemLayout
from megabert.finetune.encoding import TaskEncoding, TaskItem
from megabert.finetune.files import Example
from megabert.finetune.heads import Finetuner
from megabert.finetune.tasks import DESCRIPTION, Task, located_finetuned
from megabert.hf import TOKENIZER_FILES, Pretrained
from megabert.hf.read import MLM_HEAD, NSP_HEAD, start_state
from megabert.model import BertForPreTraining

WEIGHTS = "model.safetensors"
# of task.json
FORMAT = 1


@dataclass(frozen=True)
class Described:
    """Description of a fine-tuned model without its weights. `max_length`, `stride`, `every_token` and `separators` (false and 1 in
    models saved before they were) as of `encoding.TaskEncoding`, `threshold` as of `scores.decode`, `layers` as of `heads.Finetuner`."""

    task: Task
    labels: tuple[str, ...]
    max_length: int
    stride: int
    config: Config
    threshold: float = 0.5
    layers: str = "last"
    every_token: bool = False
    separators: int = 1

    @property
    def outputs(self) -> int:
        """Number of outputs of the added layer at each position."""
        return {"score": 1, "span": 2}.get(self.task.kind, len(self.labels))

    @property
    def layout(self) -> ItemLayout:
        return ItemLayout(self.task.kind, self.max_length, self.config.data.masking.causal)


@dataclass(frozen=True)
class Finetuned:
    """A model in its compute dtype and eval mode; `results`: its metrics in training."""

    folder: Path
    described: Described
    tokenizer: Tokenizer
    module: Finetuner
    results: dict[str, Any]

    def items(self, task: Task, examples: Sequence[Example]) -> list[TaskItem]:
        """Examples encoded as in training; `task` is the model's, possibly with other columns. Raises as `TaskEncoding.encode`."""
        d = self.described
        how = d.max_length, d.stride, d.every_token, d.separators
        return TaskEncoding(task, self.tokenizer, d.labels, *how).encode(examples)


def save(
    folder: Path, described: Described, weights: Mapping[str, Tensor], tokenizer: Tokenizer, results: Mapping[str, Any]
) -> None:
    """Write the folder, replacing that of an earlier call."""
    tree = asdict(described) | {"format": FORMAT, "config": described.config.model_dump()}
    tree |= {"tokenizer": tokenizer.sha256, "results": dict(results)}
    with atomic_folder(folder, DESCRIPTION, overwrite=True) as new:
        write_tensors(new / WEIGHTS, weights)
        for name, data in tokenizer.files().items():
            (new / name).write_bytes(data)
        (new / DESCRIPTION).write_bytes(canonical(tree))


def base(found: Finetuned) -> Pretrained:
    """A fine-tuned model, in fp32 on the CPU, as one to fine-tune: its encoder, with the pooler or transform before its added layer
    where pre-training made them. Its pre-training heads, which were not saved, are those of a new model."""
    parts = {"encoder.": "", "head.pooler.": "pooler.", "head.transform.": "mlm."}
    saved = {
        ours + name.removeprefix(theirs): tensor
        for name, tensor in found.module.state_dict().items()
        for theirs, ours in parts.items()
        if name.startswith(theirs)
    }
    old = found.described.config
    model = configuration.replace(old.model, "nsp", old.model.nsp and "pooler.weight" in saved)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(old.seed)
        new = BertForPreTraining(model, OpsConfig(), "cpu", torch.float32, old.data.masking.causal).state_dict()
    cfg = Config(model=model, data=DataConfig(masking=old.data.masking))
    state = start_state(found.folder, cfg, found.tokenizer)
    weights = {name: saved.get(name, tensor) for name, tensor in new.items()}
    mlm = f"{MLM_HEAD} (decoder.bias)" if any(name.startswith("mlm.") for name in saved) else MLM_HEAD
    initialised = (mlm, NSP_HEAD) if model.nsp else (mlm,)
    return Pretrained(found.folder, weights, state, cfg, found.tokenizer, initialised)


def load(source: str | Path, device: torch.device, precision: str = "") -> Finetuned:
    """The model in `precision`, by default that of training (fp32 on a CPU that would emulate it); `source` is its folder, or its
    name on the hub. Raises ValueError naming a file that is missing, damaged or does not fit the others."""
    folder = located_finetuned(source)
    path = folder / DESCRIPTION
    try:
        tree = json.loads(path.read_text())
        refuse_newer(tree["format"], FORMAT, str(path))
        sha256, results = str(tree["tokenizer"]), dict(tree["results"])
        config = configuration.from_dict(tree["config"])
        known = {each.name: tree[each.name] for each in fields(Described) if each.name in tree}
        task = Task(**_with_tuples(tree["task"]))
        described = Described(**_with_tuples(known) | {"task": task, "config": config})
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: does not describe a fine-tuned model ({error!r:.80})") from None
    tokenizers = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not tokenizers:
        raise ValueError(f"{folder}: its tokenizer is missing ({' or '.join(TOKENIZER_FILES)})")
    tokenizer = Tokenizer.load(tokenizers[0])
    if tokenizer.sha256 != sha256:
        raise ValueError(f"{tokenizer.path}: is not the tokenizer of this model (its SHA-256 differs)")
    dtype = DTYPES.get(precision) or dtype_on(device, precision or config.precision)
    module = heads.build(config, described.task.kind, described.outputs, None, device, dtype, described.layers)
    try:
        weights = load_file(folder / WEIGHTS)
        refuse_non_finite(weights, folder / WEIGHTS)
        module.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / WEIGHTS}: does not hold this model's weights ({reason:.120})") from None
    return Finetuned(folder, described, tokenizer, module.to(device, dtype).eval(), results)


def _with_tuples(tree: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists for tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()}

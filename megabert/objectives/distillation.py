"""Distillation: a student with fewer layers is trained on the outputs of a teacher and on the text.

The losses are DistilBERT's (Sanh et al. 2019, section 3): KL(teacher || student) at a temperature, the language model's
own, and one minus the cosine of the last hidden states, with the weights and the choice of layers of its released code
(github.com/huggingface/transformers-research-projects, distillation: README.md and scripts/extract_distilbert.py). The
soft loss is taken where the language model predicts, as that code does with --restrict_ce_to_mask (without it: at every
token): logits exist only there. The teacher is not a submodule, so it is in no optimizer,
checkpoint or ZeRO partition. The trained student is an ordinary run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import hf
from megabert.config import Config, ModelConfig, changed
from megabert.data.masking import IGNORE
from megabert.engine import DTYPES
from megabert.hf import Pretrained, fingerprint
from megabert.model import BertForPreTraining

ENCODED = ("input_ids", "segment_ids", "position_ids", "key_start", "key_end", "lengths")
# of teacher and student, whose weights have the same shapes
SAME = (
    *("kind", "hidden", "heads", "key_heads", "ffn", "norm", "rms_norm", "bias", "decoder_bias", "transform", "tied"),
    *("segments", "max_positions", "first_position", "vocab_size"),
)
# names of settings, where they may be 0
SETTINGS = {"ffn": "intermediate", "key_heads": "kv_heads"}


class Student(BertForPreTraining):
    """In training its losses are `terms`, and the teacher runs too; in evaluation it is a plain BERT.

    Metrics beside the losses: of `soft`, how often student and teacher prefer the same id; of `cosine`, the mean cosine.
    `provenance`: the teacher as recorded in checkpoints.
    """

    def __init__(self, config: Config, teacher: Pretrained, device: torch.device) -> None:
        """Starts from weights of `teacher`. Raises ValueError naming the field in which the two do not fit."""
        check(config, teacher)
        dtype, causal = DTYPES[config.precision], config.data.masking.causal
        super().__init__(config.model, config.ops, device.type, dtype, causal)
        self.terms = (*self.terms, "soft", "cosine")
        self.weights = (config.distill.mlm, 1.0, config.distill.soft, config.distill.cosine)
        self._temperature = config.distill.temperature
        first = first_weights(teacher.weights, teacher.config.model.layers, config.model)
        self.load_state_dict(first)
        guide = BertForPreTraining(teacher.config.model, config.ops, device.type, dtype, causal)
        guide.load_state_dict(teacher.weights)
        self._teacher = (guide.to(device, dtype).eval().requires_grad_(False),)  # a tuple: not registered
        self.provenance = {"teacher": fingerprint(teacher.weights)}

    @property
    def teacher(self) -> BertForPreTraining:
        return self._teacher[0]

    def forward(self, *args: Any, seed: Tensor | None = None, **batch: Any) -> Any:
        """Sums of the four losses, then the number of correct predictions of each; shapes of `batch` as BertForPreTraining's."""
        if not self.training:
            output = super().forward(*args, **(batch | {"seed": seed}))
            if isinstance(output, Tensor):
                return output
            half, none = len(output) // 2, torch.zeros_like(output[0])
            return *output[:half], none, none, *output[half:], none, none
        assert not args
        inputs = {name: batch[name] for name in ENCODED} | {"causal": batch.get("causal", False)}
        labels, at = batch["mlm_labels"].flatten(), batch["mlm_positions"].flatten()
        hidden = self.encode(**inputs, seed=seed).flatten(0, 1)  # (B * T, D)
        with torch.no_grad():
            no_dropout = torch.zeros(1, dtype=torch.int64, device=hidden.device)
            wanted = self.teacher.encode(**inputs, seed=no_dropout).flatten(0, 1)
            wanted_logits = self.teacher.mlm_logits(wanted.index_select(0, at))
        logits = self.mlm_logits(hidden.index_select(0, at))  # (B * K, V)
        mlm = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
        soft, agreed = soft_loss(logits, wanted_logits, labels != IGNORE, self._temperature)
        real = _compared(inputs["key_end"], batch["mlm_labels"])
        cosine = F.cosine_similarity(hidden.float(), wanted.float(), dim=-1) * real.flatten()
        nsp, nsp_correct = mlm.new_zeros(()), labels.new_zeros(())
        if self.cfg.nsp:
            follows = batch["nsp_labels"].flatten()
            scores = self.nsp_logits(hidden.index_select(0, batch["cls_positions"].flatten())).float()
            nsp = F.cross_entropy(scores, follows, ignore_index=IGNORE, reduction="sum")
            nsp_correct = (scores.argmax(-1) == follows).sum()
        losses = (mlm, nsp, soft, real.sum() - cosine.sum())
        return *losses, (logits.argmax(-1) == labels).sum(), nsp_correct, agreed, cosine.sum().detach()

    def counts(self, batch: Any) -> tuple[int, ...]:
        return *super().counts(batch), batch.predictions, int(_compared(batch.key_end, batch.mlm_labels).sum())


def _compared(key_end: Tensor, labels: Tensor) -> Tensor:
    """bool [B, T]: tokens of rows with predictions; a row without is a filler, or none of its words could be masked."""
    return (key_end > 0) & (labels != IGNORE).any(1, keepdim=True)


def soft_loss(logits: Tensor, wanted: Tensor, real: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """KL(softmax(wanted / T) || softmax(logits / T)) x T^2 (Hinton et al. 2015, section 2), summed over the `real` of N
    positions (bool [N]; logits [N, V]), and at how many of them both prefer the same id."""
    ours = (logits.float() / temperature).log_softmax(-1)
    theirs = (wanted.float() / temperature).log_softmax(-1)
    divergence = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)  # (N,)
    same = (logits.argmax(-1) == wanted.argmax(-1)) & real
    return (divergence * real).sum() * temperature**2, same.sum()


def build(config: Config, tokenizer: str, device: torch.device) -> Student:
    """The student of `distill.teacher`, with fp32 weights.

    `tokenizer` is the SHA-256 of the data's. Raises ValueError when the teacher has another one, is not a model, or does not
    fit the student.
    """
    teacher = hf.load(config.distill.teacher)
    teacher.refuse_without_mlm_head()
    if tokenizer and not teacher.tokenizer.is_of(tokenizer):
        raise ValueError(
            f"distill.teacher={config.distill.teacher}: its tokenizer is not the dataset's (SHA-256 differs); build the "
            f"dataset with --tokenizer {shlex.quote(str(teacher.tokenizer.path))}"
        )
    return Student(config, teacher, device)


def check(config: Config, teacher: Pretrained) -> None:
    """Raises ValueError naming the field in which teacher and student do not fit."""
    ours, theirs = config.model, teacher.config.model
    for field in SAME:
        if getattr(ours, field) != getattr(theirs, field):
            name = SETTINGS.get(field, field)
            raise ValueError(
                f"model.{name}={getattr(ours, field)} but the teacher's is {getattr(theirs, field)}; "
                "a student differs from its teacher in layers only"
            )
    if ours.layers > theirs.layers:
        raise ValueError(f"model.layers={ours.layers} but distill.teacher has {theirs.layers}; lower it")
    if ours.nsp and not theirs.nsp:
        raise ValueError("model.nsp=true but distill.teacher has no next-sentence head; set model.nsp=false")
    if config.data.masking.causal != teacher.config.data.masking.causal:
        raise ValueError(
            f"data.masking.strategy={config.data.masking.strategy} but distill.teacher was trained with "
            f"{teacher.config.data.masking.strategy}: one of them is causal, the other is not"
        )


def layers_taken(teacher: int, student: ModelConfig) -> list[int]:
    """Layers of a teacher of so many from which the student starts: evenly from the first to the last, so 0, 2, 4, 7, 9, 11 for 6 of
    12 (the released choice) and 0, 3 for 2 of 4; for a local layer the nearest local one, for a global layer the nearest global one."""
    window, taken = student.layer_window, list[int]()
    for i in range(student.layers):
        place = i * (teacher - 1) / max(student.layers - 1, 1)
        alike = [j for j in range(teacher) if window(j) == window(i)]
        # as many of the kind as later layers of the student need
        later = sum(window(k) == window(i) for k in range(i + 1, student.layers))
        free = [j for j in alike[: len(alike) - later] if not taken or j > taken[-1]]
        # of two that are equally near the even one, as `round` does
        taken.append(min(free or alike, key=lambda j: (abs(j - place), j % 2)))
    return taken


def first_weights(weights: Mapping[str, Tensor], layers: int, student: ModelConfig) -> dict[str, Tensor]:
    """A student's state dict from a teacher of `layers` layers: embeddings, heads, and `layers_taken`."""
    result = {name: tensor for name, tensor in weights.items() if not name.startswith("layers.")}
    if not student.nsp:
        result = {name: t for name, t in result.items() if not name.startswith(("pooler.", "nsp."))}
    taken = layers_taken(layers, student)
    # a pre-LN norm is named after the block before it, and belongs to the layer behind
    norms = [*(layer - 1 for layer in taken[1:]), layers - 1] if student.norm == "pre" else taken
    for ours, (layer, norm) in enumerate(zip(taken, norms, strict=True)):
        for name, tensor in weights.items():
            of_norm = name.startswith(f"layers.{norm}.feed_forward_output.norm_")
            of_layer = name.startswith(f"layers.{layer}.") and ".feed_forward_output.norm_" not in name
            if of_norm or of_layer:
                result[f"layers.{ours}.{name.split('.', 2)[2]}"] = tensor
    return result


def student_overrides(teacher: Config, source: str, layers: int) -> list[str]:
    """The student of `source` as overrides `section.key=value` of the defaults. Raises ValueError."""
    if not 1 <= layers <= teacher.model.layers:
        raise ValueError(f"--layers {layers}: the teacher has {teacher.model.layers}")
    tree = teacher.model_dump()
    tree["model"]["layers"] = layers
    tree["data"]["path"] = tree["init_from"] = ""
    tree["init_moments"] = False
    tree["data"]["mix"] = {}  # of the teacher's data
    tree["checkpoint"]["mirror"] = ""  # of the teacher's run
    # A student is trained on masked predictions throughout.
    tree["objective"]["causal_share"], tree["data"]["masking"]["causal_every"], tree["phases"] = 0.0, 0, []
    tree["distill"] = Config().distill.model_dump() | {"teacher": source}
    values = changed(tree).items()
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values]

"""Schema of a run's configuration: frozen, typed and checked fields with descriptions.

Types are strict. The global batch is set by the user; accumulation is derived and not a field.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megabert.common.storage import glob_folder, is_url

VOCAB_MULTIPLE = 128  # the embedding is padded to a multiple of it, so that matrix products have aligned shapes
MOST_LAYERS = 10_000
NO_LIMIT = 1_000_000_000  # updates of a run that only its tokens or minutes limit


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def contradictions(self) -> Iterator[str]:
        """For each two fields that contradict each other a message that names them and says what to do."""
        yield from ()

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and value >= 1 << 63:
            raise PydanticCustomError("huge", "must be below 2^63")
        return value

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for message in self.contradictions():
            raise ValueError(message)
        return self


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


S = TypeVar("S", bound=Section)


def replace(section: S, name: str, value: Any) -> S:
    """A copy of a config, or of a section, with another value of a field (`batch.micro_size`), which is not checked."""
    first, _, rest = name.partition(".")
    return section.model_copy(update={first: replace(getattr(section, first), rest, value) if rest else value})


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field with its description, and the limits of its value (gt, ge, lt, le)."""
    return Field(default, description=description, **limits)


class ModelConfig(Section):
    """The model. BASE is 12 layers, 768, 12 heads; LARGE is 24, 1024, 16 (Devlin et al. 2019)."""

    kind: Literal["bert", "modern", "nomic"] = setting(
        "bert",
        "modern: rotary positions, a gated feed-forward layer, no segments (Warner et al. 2024, "
        "ModernBERT); with norm=pre and nsp=false. nomic: the first two, segments, no biases in the layers (Nussbaum "
        "et al. 2024, NomicBERT); with norm=post and nsp=false",
    )
    layers: int = setting(12, "number of encoder layers", gt=0, le=MOST_LAYERS)
    hidden: int = setting(768, "width of the residual stream", gt=0)
    heads: int = setting(12, "attention heads; must divide hidden", gt=0)
    kv_heads: int = setting(0, "heads of keys and values, shared by groups of heads; 0: as heads", ge=0)
    intermediate: int = setting(0, "feed-forward width; 0: 4 x hidden, or gated with as many weights", ge=0)
    vocab_size: int = setting(0, "tokenizer entries; 0: those of the dataset's tokenizer", ge=0)
    max_positions: int = setting(512, "most tokens of a sequence; bert has a learned position for each", gt=0)
    norm: Literal["post", "pre"] = setting("post", "LayerNorm after (published) or before each block")
    dropout: float = setting(0.1, "dropout on embeddings and block outputs", ge=0, lt=1)
    attention_dropout: float = setting(0.1, "dropout on attention probabilities", ge=0, lt=1)
    layer_norm_eps: float = setting(1e-12, "added to the variance in LayerNorm", gt=0)
    rms_norm: bool = setting(False, "RMSNorm (Zhang & Sennrich 2019) instead of LayerNorm")
    bias: bool = setting(True, "biases of linear layers and norms; the decoder has decoder_bias")
    decoder_bias: bool = setting(True, "the decoder has a bias")
    window: int = setting(0, "of local layers, half of it on each side of a token; 0: no local layers", ge=0)
    global_every: int = setting(3, "with a window: layers 0, n, 2n, ... are global", gt=0)
    rope_theta: float = setting(10_000.0, "base of rotary positions in global layers", gt=0)
    local_rope_theta: float = setting(10_000.0, "base of rotary positions in local layers", gt=0)
    activation: Literal["gelu", "silu"] = setting("gelu", "of the gated feed-forward layer; silu: SwiGLU")
    embedding_norm: bool = setting(True, "modern: the residual stream starts with normalised embeddings")
    transform: bool = setting(True, "dense layer, GELU and norm between encoder and decoder")
    segments: Literal[1, 2] = setting(2, "bert: learned segments; 1: one for all tokens (RoBERTa)")
    first_position: int = setting(0, "bert: index of the first token's position; 2 in RoBERTa", ge=0)
    hub_type: str = setting("", "model_type of an export, if several have this shape (xlm-roberta, ...)")
    init_std: float = setting(0.02, "standard deviation of the truncated-normal initialisation", gt=0)
    nsp: bool = setting(True, "train the next-sentence head")
    tied: bool = setting(True, "the decoder's weights are the word embedding's")
    zero_init: bool = setting(False, "zero projections into the residual stream, so that layers start as identities")
    neighbour_heads: bool = setting(
        False, "rotary positions: two heads of each layer start at the token before and the one after"
    )
    frequency_bias: bool = setting(False, "initialise the decoder's bias with the tokens' log-frequencies")
    activation_checkpointing: bool = setting(False, "recompute each layer in backward to save memory")

    def contradictions(self) -> Iterator[str]:
        if self.hidden % self.heads:
            yield f"model.heads={self.heads} does not divide model.hidden={self.hidden}"
        if self.heads % self.key_heads:
            yield f"model.kv_heads={self.key_heads} does not divide model.heads={self.heads}"
        if self.window % 2:
            yield f"model.window={self.window} is odd; half of it lies on each side of a token"
        if self.frequency_bias and not self.decoder_bias:
            yield "model.frequency_bias=true needs a bias of the decoder; set model.decoder_bias=true"
        if self.neighbour_heads and not (self.gated and self.layer_bias):
            yield "model.neighbour_heads=true needs rotary positions and biases: model.kind=modern and model.bias=true"
        if self.neighbour_heads and self.heads < 2:
            yield f"model.neighbour_heads=true needs two heads or more; model.heads={self.heads}"
        if self.activation != "gelu" and not self.gated:
            yield f"model.activation={self.activation} needs model.kind=modern or nomic"
        if not self.embedding_norm and not self.modern:
            yield "model.embedding_norm=false needs model.kind=modern"
        kind, norm, width = f"model.kind={self.kind}", "pre" if self.modern else "post", self.hidden // self.heads
        if self.gated and self.norm != norm:
            yield f"{kind} needs model.norm={norm}; it is {self.norm}"
        if self.gated and self.nsp:
            yield f"{kind} needs model.nsp=false; it is true"
        if self.gated and width % 2:
            yield f"{kind} turns pairs of columns: model.hidden / model.heads = {width} is odd"

    @property
    def ffn(self) -> int:
        gated = max(1, round(8 * self.hidden / 3 / 64)) * 64
        return self.intermediate or (gated if self.gated else 4 * self.hidden)

    @property
    def ffn_inputs(self) -> int:
        """Columns of the feed-forward layer's first product, including the gate."""
        return 2 * self.ffn if self.gated else self.ffn

    @property
    def modern(self) -> bool:
        return self.kind == "modern"

    @property
    def gated(self) -> bool:
        """Whether it has a gated feed-forward layer, and with it rotary positions."""
        return self.kind != "bert"

    @property
    def layer_bias(self) -> bool:
        """Whether the linear layers in front of the heads have biases."""
        return self.bias and self.kind != "nomic"

    @property
    def segmented(self) -> bool:
        """Whether the parts of a pair have different embeddings."""
        return not self.modern and self.segments > 1

    @property
    def key_heads(self) -> int:
        """Heads of keys and of values."""
        return self.kv_heads or self.heads

    @property
    def qkv_columns(self) -> int:
        """Columns of the product before attention: queries, keys and values."""
        return self.hidden + 2 * self.hidden // self.heads * self.key_heads

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        return self.layers * self.hidden * (self.qkv_columns + self.hidden + self.ffn_inputs + self.ffn)

    def layer_window(self, layer: int) -> int:
        """The layer's window; 0 for a global layer."""
        return self.window if layer % self.global_every else 0

    def layer_theta(self, layer: int) -> float:
        """Base of the layer's rotary positions."""
        return self.local_rope_theta if self.layer_window(layer) else self.rope_theta

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class MaskingConfig(Section):
    """Masked language modelling as published: 15% of the tokens, of which 80/10/10 (Devlin et al. 2019, section 3.1)."""

    strategy: Literal["token", "word", "span", "causal"] = setting(
        "token",
        "token: single tokens; word: whole words; span: runs of 1 to 10 whole words (Joshi et al. 2020, SpanBERT); causal: "
        "nothing is masked, each token predicts the next",
    )
    rate: float = setting(0.15, "share of the maskable tokens predicted; unused with causal", gt=0, lt=1)
    mask: float = setting(0.8, "share of the predicted tokens shown as [MASK]", ge=0, le=1)
    random: float = setting(0.1, "share of the predicted tokens shown as a random token", ge=0, le=1)
    max_predictions: int = setting(0, "prediction slots a row; 0 means ceil(rate x seq_len) + 1", ge=0)
    causal_every: int = setting(0, "not with causal: each n-th update is causal (16: 1 to 15 masked); 0: none", ge=0)

    def contradictions(self) -> Iterator[str]:
        if self.mask + self.random > 1:
            yield "data.masking.mask + data.masking.random exceed 1"
        if self.causal_every == 1:
            yield "data.masking.causal_every=1 makes every update causal; set it to 0 and data.masking.strategy to causal"

    @property
    def causal(self) -> bool:
        """Whether a token attends only to the tokens before it and itself."""
        return self.strategy == "causal"

    @property
    def objective(self) -> Literal["causal", "masked"]:
        """The objective of an update with this masking."""
        return "causal" if self.causal else "masked"

    @property
    def causal_part(self) -> float:
        """Share of the updates that are causal."""
        return 1.0 if self.causal else 1 / self.causal_every if self.causal_every else 0.0

    def of_update(self, step: int) -> MaskingConfig:
        """The masking of update `step` of the data (0 for the first)."""
        mixed_in = self.causal_every and (step + 1) % self.causal_every == 0
        return replace(self, "strategy", "causal") if mixed_in else self

    def capacity(self, seq_len: int) -> int:
        """K, the prediction slots of a row of `seq_len` positions."""
        if self.causal:
            return seq_len
        return min(seq_len, self.max_predictions or math.ceil(self.rate * seq_len) + 1)


class ObjectiveConfig(Section):
    """The objective of updates by the share of the run's budget used before them (Gisserot-Boukhlef et al. 2025). For a fixed
    ratio see data.masking.causal_every. Evaluation is always masked LM."""

    causal_share: float = setting(0.0, "share of the budget trained causally, before masked LM", ge=0, lt=1)


class DataConfig(Section):
    """Source of the rows."""

    path: str = setting("", "dataset written by data_prep, a folder or a URL (also --data)")
    cache_dir: str = setting("", "folder for copies of datasets that are URLs; '': ~/.cache/megabert/datasets")
    cache_gib: float = setting(100.0, "most GiB of shards there; the order has up to 64 in use at a time", gt=0)
    mix: dict[str, float] = setting({}, 'other datasets and their shares of all rows: {"data/books" = 0.3}')
    seq_len: int = setting(
        0, "tokens of a row, for a plan without data; datasets with other rows are refused; 0: any", ge=0
    )
    workers: int = setting(2, "loader processes of each rank; 0: loading in the training process", ge=0, le=1000)
    prefetch: int = setting(4, "micro-batches each worker keeps ready", gt=0)
    masking: MaskingConfig = MaskingConfig()

    @field_validator("mix")
    @classmethod
    def _in_one_order(cls, mix: dict[str, float]) -> dict[str, float]:
        """The order of the parts decides that of the rows; a saved configuration is sorted."""
        return dict(sorted(mix.items()))


class BatchConfig(Section):
    """Rows of an update, and rows of a device at a time."""

    global_size: int = setting(256, "rows of one update over all ranks and micro-steps", gt=0, le=100_000_000)
    micro_size: int = setting(32, "most rows of a forward and backward pass on a rank", gt=0)


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019), LAMB (You et al. 2020), Muon (Jordan et al. 2024) or StableAdamW (Wortsman et al. 2023)."""

    name: Literal["adamw", "lamb", "muon", "stable_adamw"] = setting(
        "adamw", "update rule; muon: for the layers' matrices, with adamw for all other parameters"
    )
    lr: float = setting(1e-4, "peak learning rate", gt=0)
    embedding_lr: float = setting(
        1.0, "factor of the embeddings' learning rate, a tied decoder's weight included; 0 freezes them", ge=0
    )
    layer_decay: float = setting(1.0, "factor of the rate from each layer to the one below", gt=0, le=1)
    beta1: float = setting(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = setting(0.999, "decay of the second moment", ge=0, lt=1)
    eps: float = setting(1e-6, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.01, "decoupled decay; not applied to LayerNorm and biases", ge=0)
    clip: float = setting(1.0, "limit of the global gradient norm; 0: no clipping", ge=0)
    split_qkv: bool = setting(False, "LAMB: separate trust ratios of queries, keys and values (as NVIDIA)")

    def contradictions(self) -> Iterator[str]:
        if self.split_qkv and self.name != "lamb":
            yield f"optimizer.split_qkv=true: optimizer.name={self.name} has no trust ratios; set it to false"


class ScheduleConfig(Section):
    """Warm-up, then decay, by updates, tokens or minutes of training; the run ends when the budget is used.

    `wsd` stays at the peak until its decay (Hu et al. 2024, MiniCPM, section 4), which is linear.
    """

    name: Literal["linear", "polynomial", "cosine", "sqrt", "constant", "wsd", "budget"] = setting(
        "linear", "decay shape; sqrt: 1 - sqrt(progress); budget: linear by minutes"
    )
    by: Literal["steps", "tokens", "minutes"] = setting("steps", "unit of the budget; minutes if name=budget")
    total_steps: int = setting(
        100_000, "updates of the run; by tokens or minutes their largest number, without a limit if not set", gt=0
    )
    warmup_steps: int = setting(10_000, "updates of linear warm-up; otherwise budget_warmup", ge=0)
    power: float = setting(1.0, "exponent of the polynomial decay", gt=0)
    final_ratio: float = setting(0.0, "final learning rate as a share of the peak", ge=0, le=1)
    decay_share: float = setting(0.2, "last share of the budget, in which wsd decays", gt=0, le=1)
    budget_minutes: float = setting(0.0, "budget by minutes of training, kept across resumes", ge=0)
    budget_tokens: int = setting(0, "budget by real tokens, over all ranks", ge=0)
    budget_warmup: float = setting(0.06, "warm-up as a share of a budget of tokens or minutes", ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _no_default_limit(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and (tree.get("by", "steps") != "steps" or tree.get("name") == "budget"):
            return {"total_steps": NO_LIMIT} | dict(tree)
        return tree

    def contradictions(self) -> Iterator[str]:
        if self.unit != "steps" and not getattr(self, f"budget_{self.unit}"):
            yield f"{self.unit_key} needs schedule.budget_{self.unit} above 0"
        if self.unit == "steps" and self.warmup_steps > self.total_steps:
            yield f"schedule.warmup_steps={self.warmup_steps} exceeds schedule.total_steps={self.total_steps}; lower it"
        if self.name == "wsd" and self.warmup_share + self.decay_share > 1:
            warmup = f"a warm-up of {self.warmup_share:.2g} of the budget"
            yield f"schedule.decay_share={self.decay_share:g} and {warmup} exceed it; lower one of them"

    def unused(self, given: Mapping[str, Any], phases: Iterable[ScheduleConfig] = ()) -> Iterator[str]:
        """What is wrong with values by `section.key` that were given, none of them 0, but have no effect beside the others and in none of
        the `phases`."""
        for unit in ("minutes", "tokens"):
            if self.unit != unit and given.get(f"schedule.budget_{unit}"):
                yield f"schedule.budget_{unit}: has no effect without schedule.by={unit}; set both"
        if self.unit != "steps" and given.get("schedule.warmup_steps"):
            yield f"schedule.warmup_steps: has no effect with {self.unit_key}; set schedule.budget_warmup, a share"
        if self.unit == "steps" and given.get("schedule.budget_warmup"):
            yield "schedule.budget_warmup: has no effect without a budget of minutes or tokens; set schedule.warmup_steps"
        names = {each.name for each in (self, *phases)}
        for key, name, neutral in (("decay_share", "wsd", 0), ("power", "polynomial", 1)):
            if name not in names and given.get(f"schedule.{key}", neutral) != neutral:
                yield f"schedule.{key}: has no effect without schedule.name={name}; set both"
        if names == {"constant"} and given.get("schedule.final_ratio", 1) not in (0, 1):
            yield "schedule.final_ratio: has no effect with schedule.name=constant; choose another"

    @property
    def unit(self) -> str:
        """Unit of the budget."""
        return "minutes" if self.name == "budget" else self.by

    @property
    def unit_key(self) -> str:
        """The setting that chooses the unit."""
        return "schedule.name=budget" if self.name == "budget" else f"schedule.by={self.by}"

    @property
    def warmup_share(self) -> float:
        """Share of the budget in warm-up."""
        return self.warmup_steps / self.total_steps if self.unit == "steps" else self.budget_warmup


class ZeroConfig(Section):
    """DeepSpeed ZeRO (Rajbhandari et al. 2020)."""

    stage: Literal[0, 1, 2, 3] = setting(1, "what is partitioned: 1 optimizer, 2 gradients, 3 weights")


class OpsConfig(Section):
    """Backends of the operations; `megabert doctor` shows the choices of `auto` and why."""

    attention: Literal["auto", "sdpa", "varlen", "flash3", "native", "fused_softmax"] = setting(
        "auto",
        "attention backend; auto: native where it can run, else varlen where it can, else sdpa; "
        "flash3: FlashAttention-3, with attention_dropout=0",
    )
    mlm_loss: Literal["auto", "torch", "native"] = setting("auto", "masked-LM loss backend; auto: native, else torch")
    layer: Literal["auto", "torch", "native", "compiled"] = setting(
        "auto",
        "bias+GELU and dropout+add+LayerNorm; auto: native, else torch; compiled: the whole layer by torch.compile",
    )
    optimizer: Literal["auto", "torch", "apex"] = setting(
        "auto",
        "kernels of AdamW or LAMB; apex: NVIDIA's, LAMB only at zero.stage 0 without split_qkv, no Muon or StableAdamW",
    )


class CheckpointConfig(Section):
    """Intervals of checkpoints, and which are kept. A failed save ends the run."""

    interval: int = setting(1000, "updates between checkpoints; 0: only by minutes, and at the end", ge=0)
    minutes: float = setting(0.0, "minutes of training after which a checkpoint is also due; 0: only by updates", ge=0)
    keep: int = setting(2, "number of newest committed checkpoints to keep", gt=0)
    keep_every: int = setting(0, "also keep checkpoints at multiples of this step; 0: none", ge=0)
    asynchronous: bool = setting(True, "save in the background from host copies of 12 bytes a parameter")
    mirror: str = setting(
        "", "URL to which checkpoints and logs are copied; a start with an empty run folder copies them back"
    )
    copy_every: int = setting(
        1, "updates between copies of the training state in memory, where ranks restart --in-place", gt=0
    )

    def contradictions(self) -> Iterator[str]:
        if self.mirror and not is_url(self.mirror):
            yield f"checkpoint.mirror={self.mirror} is not a URL; give one, such as s3://BUCKET/RUN"
        elif self.mirror and glob_folder(self.mirror):  # its list would be that of a pattern
            yield f"checkpoint.mirror={self.mirror} has a wildcard (*, ? or [); name another URL"
        elif self.mirror.startswith("hf://") and not self.mirror.startswith("hf://buckets/"):
            # 128 commits an hour, and the mirror's lock alone is renewed every 10 s
            yield f"checkpoint.mirror={self.mirror} is a repository of the hub, which limits commits; use hf://buckets/OWNER/NAME"


class EvalConfig(Section):
    """Evaluation on held-out rows, under a fixed mask."""

    interval: int = setting(
        1000, "updates between held-out evaluations; 0: only before the first and after the last update", ge=0
    )
    rows: int = setting(4096, "most held-out rows to evaluate", gt=0)
    patience: int = setting(
        0,
        "consecutive evaluations without a lower loss, in the last phase, that end the run; RUN/best is the best "
        "checkpoint; 0: off",
        ge=0,
    )
    rate: float = setting(0.0, "masking rate of held-out rows, by token; 0: that at the end of the run", ge=0, lt=1)
    pairs: str = setting("", "file or folder of minimal pairs (`megabert pairs`) to score too; empty: none")
    pairs_each: int = setting(20, "pairs of each paradigm to score", gt=0)

    def contradictions(self) -> Iterator[str]:
        if self.patience and not self.interval:
            yield f"eval.patience={self.patience} counts evaluations; set eval.interval above 0"


class DistillConfig(Section):
    """Distillation from a teacher: DistilBERT (Sanh et al. 2019, section 3), with the temperature and weights of its released
    training command. The next-sentence loss, if any, has weight 1."""

    teacher: str = setting("", "run, checkpoint or Hugging Face folder of the teacher; empty: none")
    temperature: float = setting(2.0, "divisor of the logits of both models in the soft loss", gt=0)
    soft: float = setting(5.0, "weight of KL(teacher || student) x temperature^2", ge=0)
    mlm: float = setting(2.0, "weight of the language-model loss", ge=0)
    cosine: float = setting(1.0, "weight of 1 - cosine of the last hidden states", ge=0)


class SpikesConfig(Section):
    """Losses far above the recent ones. `rollback` is PaLM's recipe (Chowdhery et al. 2022, section 5.1): return to the
    newest checkpoint before the spike and skip the data from there through the spike."""

    policy: Literal["off", "warn", "skip", "rollback"] = setting(
        "warn", "warn or roll back with the next log line, or skip the update, which synchronises at each"
    )
    threshold: float = setting(10.0, "modified z-score above which a loss is a spike", gt=0)
    window: int = setting(128, "recent updates to compare a loss with, from a quarter of them on", ge=8)
    max_rollbacks: int = setting(5, "rollbacks of a process before the run stops", ge=0)


class WatchdogConfig(Section):
    """Ends a hanging job, and reports slow ranks."""

    timeout_seconds: float = setting(600.0, "seconds without progress that end the job; 0: off", ge=0)
    slow_ratio: float = setting(
        1.08, "ratio to the ranks' median that names a slow one; 1.08 finds 10% despite noise", gt=1
    )
    # shorter causes are temporary: a save in the background, another job's peak on a file system
    slow_minutes: float = setting(3.0, "minutes of training over which a rank is slow, and at least 50 updates", gt=0)


class LogConfig(Section):
    """Intervals of log lines, and sinks besides `metrics.jsonl`."""

    interval: int = setting(10, "updates between log lines, and between readings of the device", gt=0)
    seconds: float = setting(0.0, "least seconds of training between log lines; 0: a line at every interval", ge=0)
    tensorboard: bool = setting(True, "write TensorBoard event files into the run's folder")
    wandb: str = setting("", "project of Weights & Biases for the metrics; empty: none")
    to: list[str] = setting(
        [],
        "trackers: wandb, mlflow, trackio, each also as NAME=PROJECT, or a class of one's own as package.module:Class",
    )


class PhaseConfig(Section):
    """A phase of the run: its share of the budget, and tables of the keys that it changes, which `phases` checks."""

    model_config = ConfigDict(extra="allow")
    share: int | float = setting(None, "its share of the run's budget", validate_default=True)

    @field_validator("share", mode="before")
    @classmethod
    def _above_zero(cls, share: Any) -> Any:
        if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
            raise PydanticCustomError("share", "give a number above 0, its share of the run's budget")
        return share

    @property
    def changes(self) -> dict[str, Any]:
        """The changed keys as nested dicts."""
        return self.model_extra or {}


class Config(Section):
    """All settings of a run. The hash of its canonical JSON is in each checkpoint."""

    seed: int = setting(42, "seed of initialisation, order, masking and dropout", ge=0, lt=1 << 63)
    deterministic: bool = setting(False, "reproducible updates, bit for bit, on CUDA too, which are slower")
    precision: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "compute type; master weights are fp32; auto: bf16 if the device has bf16 products, else fp32"
    )
    init_from: str = setting("", "run folder or checkpoint whose weights start this run (phase 2)")
    init_moments: bool = setting(False, "also load the moments of init_from (as NVIDIA's phase 2)")
    max_bad_steps: int = setting(
        10, "updates in a row not applied, as non-finite or skipped spikes, before the run stops", gt=0
    )
    peak_tflops: float = setting(
        0.0,
        "peak of matrix products of a device for MFU; 0: in bf16 the GPU's datasheet, else measured once a machine",
        ge=0,
    )
    phases: list[PhaseConfig] = setting(
        [],
        "phases of the run in order: each a table with its share of the budget and the keys that it changes, "
        '{share = 0.1, data.path = "data/seq8192", batch.global_size = 64, model.rope_theta = 160_000} (docs/recipes.md)',
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    zero: ZeroConfig = ZeroConfig()
    ops: OpsConfig = OpsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    distill: DistillConfig = DistillConfig()
    spikes: SpikesConfig = SpikesConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    def contradictions(self) -> Iterator[str]:
        model, masking, share = self.model, self.data.masking, self.objective.causal_share
        mixed = ["objective.causal_share"] * (share > 0) + ["data.masking.causal_every"] * (masking.causal_every > 0)
        causal = f"{mixed[0]} above 0" if mixed else "data.masking.strategy=causal"
        if self.data.seq_len > model.max_positions:
            yield f"data.seq_len={self.data.seq_len} is above model.max_positions={model.max_positions}; raise that"
        if self.ops.layer == "compiled" and self.zero.stage == 3:
            yield "ops.layer=compiled cannot trace the hooks of zero.stage=3; choose another of the two"
        if model.nsp and (masking.causal or mixed):
            no_pair = "[CLS] attends only to itself, so it cannot predict whether B follows A; set model.nsp=false"
            yield f"{causal}: {no_pair}"
        if share and masking.causal:
            ends = "objective.causal_share is for runs that end with masked LM"
            yield f"{ends}; set it to 0, or data.masking.strategy to token"
        if mixed and self.distill.teacher:
            yield f"{' and '.join(mixed)}: distill.teacher needs one objective throughout; set it to 0"
        if self.schedule.unit == "minutes" and self.deterministic:
            clock = f"{self.schedule.unit_key} depends on the clock, so no two runs are equal"
            yield f"deterministic=true: {clock}; choose another"

    @property
    def causal_updates(self) -> bool:
        """Whether any update is causal."""
        maskings = [phase.changes.get("data", {}).get("masking", {}) for phase in self.phases]
        of_phases = any(m.get("strategy") == "causal" or m.get("causal_every") for m in maskings)
        return self.data.masking.causal_part > 0 or self.objective.causal_share > 0 or of_phases

    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()


def validated(tree: Mapping[str, Any], phase: str = "") -> Config:
    """The config of nested dicts. Raises ValueError naming the first wrong field, or fields that contradict each other, and the
    `phase` that they are of."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # it names its fields
            raise ValueError(f"{phase}: {first['ctx']['error']}".removeprefix(": ")) from error
        place = ".".join(str(part + 1) if isinstance(part, int) else part for part in (phase, *first["loc"]))
        raise ValueError(f"{place}: {first['msg']} (got {first['input']!r})".removeprefix(".")) from error


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`section.key` -> value."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values

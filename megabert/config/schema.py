"""Schema of a run's configuration: frozen, typed and checked fields with descriptions.

Types are strict. The global batch is set by the user; accumulation is derived and not a field.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# the embedding is padded to a multiple of it, so that matrix products have aligned shapes
VOCAB_MULTIPLE = 128
# updates of a run that only its tokens or minutes limit
NO_LIMIT = 1_000_000_000


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def replace(section: S, name: str, value: Any) -> S:
    """A copy of a config, or of a section, with another value of a field (`batch.micro_size`), which is not checked."""
    first, _, rest = name.partition(".")
    return section.model_copy(update={first: replace(getattr(section, first), rest, value) if rest else value})


class ModelConfig(Section):
    """The model. BASE is 12 layers, 768, 12 heads; LARGE is 24, 1024, 16 (Devlin et al. 2019)."""

    kind: Literal["bert", "modern", "nomic"] = Field(
        "bert",
        description="modern: rotary positions, a gated feed-forward layer, no segments (Warner et al. 2024, "
        "ModernBERT); with norm=pre and nsp=false. nomic: the first two, segments, no biases in the layers (Nussbaum "
        "et al. 2024, NomicBERT); with norm=post and nsp=false",
    )
    layers: int = Field(12, gt=0, description="number of encoder layers")
    hidden: int = Field(768, gt=0, description="width of the residual stream")
    heads: int = Field(12, gt=0, description="attention heads; must divide hidden")
    kv_heads: int = Field(0, ge=0, description="heads of keys and values, shared by groups of heads; 0: as heads")
    intermediate: int = Field(0, ge=0, description="feed-forward width; 0: 4 x hidden, or gated with as many weights")
    vocab_size: int = Field(0, ge=0, description="tokenizer entries; 0: those of the dataset's tokenizer")
    max_positions: int = Field(512, gt=0, description="most tokens of a sequence; bert has a learned position for each")
    norm: Literal["post", "pre"] = Field("post", description="LayerNorm after (published) or before each block")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout on embeddings and block outputs")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="dropout on attention probabilities")
    layer_norm_eps: float = Field(1e-12, gt=0, description="added to the variance in LayerNorm")
    rms_norm: bool = Field(False, description="RMSNorm (Zhang & Sennrich 2019) instead of LayerNorm")
    bias: bool = Field(True, description="biases of linear layers and norms; the decoder has decoder_bias")
    decoder_bias: bool = Field(True, description="the decoder has a bias")
    window: int = Field(0, ge=0, description="of local layers, half of it on each side of a token; 0: no local layers")
    global_every: int = Field(3, gt=0, description="with a window: layers 0, n, 2n, ... are global")
    rope_theta: float = Field(10_000.0, gt=0, description="base of rotary positions in global layers")
    local_rope_theta: float = Field(10_000.0, gt=0, description="base of rotary positions in local layers")
    activation: Literal["gelu", "silu"] = Field("gelu", description="of the gated feed-forward layer; silu: SwiGLU")
    embedding_norm: bool = Field(True, description="modern: the residual stream starts with normalised embeddings")
    transform: bool = Field(True, description="dense layer, GELU and norm between encoder and decoder")
    segments: Literal[1, 2] = Field(2, description="bert: learned segments; 1: one for all tokens (RoBERTa)")
    first_position: int = Field(0, ge=0, description="bert: index of the first token's position; 2 in RoBERTa")
    hub_type: str = Field("", description="model_type of an export, if several have this shape (xlm-roberta, ...)")
    init_std: float = Field(0.02, gt=0, description="standard deviation of the truncated-normal initialisation")
    nsp: bool = Field(True, description="train the next-sentence head")
    tied: bool = Field(True, description="the decoder's weights are the word embedding's")
    zero_init: bool = Field(
        False, description="zero projections into the residual stream, so that layers start as identities"
    )
    neighbour_heads: bool = Field(
        False, description="rotary positions: two heads of each layer start at the token before and the one after"
    )
    frequency_bias: bool = Field(False, description="initialise the decoder's bias with the tokens' log-frequencies")
    activation_checkpointing: bool = Field(False, description="recompute each layer in backward to save memory")

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

    def layer_window(self, layer: int) -> int:
        """The layer's window; 0 for a global layer."""
        return self.window if layer % self.global_every else 0

    def layer_pairs(self, tokens: float, pairs: float) -> float:
        """Pairs of a query and a key, summed over the layers: `pairs` for each, in a local layer at most window + 1 a token."""
        windows = map(self.layer_window, range(self.layers))
        return sum(min(pairs, tokens * (window + 1)) if window else pairs for window in windows)

    def layer_theta(self, layer: int) -> float:
        """Base of the layer's rotary positions."""
        return self.local_rope_theta if self.layer_window(layer) else self.rope_theta

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class MaskingConfig(Section):
    """Masked language modelling as published: 15% of the tokens, of which 80/10/10 (Devlin et al. 2019, section 3.1)."""

    strategy: Literal["token", "word", "span", "causal"] = Field(
        "token",
        description="token: single tokens; word: whole words; span: runs of 1 to 10 whole words (Joshi et al. 2020, SpanBERT); causal: "
        "nothing is masked, each token predicts the next",
    )
    rate: float = Field(0.15, gt=0, lt=1, description="share of the maskable tokens predicted; unused with causal")
    mask: float = Field(0.8, ge=0, le=1, description="share of the predicted tokens shown as [MASK]")
    random: float = Field(0.1, ge=0, le=1, description="share of the predicted tokens shown as a random token")
    max_predictions: int = Field(0, ge=0, description="prediction slots a row; 0 means ceil(rate x seq_len) + 1")
    causal_every: int = Field(
        0, ge=0, description="not with causal: each n-th update is causal (16: 1 to 15 masked); 0: none"
    )

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

    causal_share: float = Field(0.0, ge=0, lt=1, description="share of the budget trained causally, before masked LM")


class DataConfig(Section):
    """Source of the rows."""

    path: str = Field("", description="dataset written by data_prep, a folder or a URL (also --data)")
    cache_dir: str = Field(
        "", description="folder for copies of datasets that are URLs; '': ~/.cache/megabert/datasets"
    )
    cache_gib: float = Field(
        100.0, gt=0, description="most GiB of shards there; the order has up to 64 in use at a time"
    )
    mix: dict[str, float] = Field({}, description='other datasets and their shares of all rows: {"data/books" = 0.3}')
    seq_len: int = Field(
        0, ge=0, description="tokens of a row, for a plan without data; datasets with other rows are refused; 0: any"
    )
    workers: int = Field(2, ge=0, description="loader processes of each rank; 0: loading in the training process")
    prefetch: int = Field(4, gt=0, description="micro-batches each worker keeps ready")
    masking: MaskingConfig = MaskingConfig()


class BatchConfig(Section):
    """Rows of an update, and rows of a device at a time."""

    global_size: int = Field(256, gt=0, description="rows of one update over all ranks and micro-steps")
    micro_size: int = Field(32, gt=0, description="most rows of a forward and backward pass on a rank")


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019), LAMB (You et al. 2020), Muon (Jordan et al. 2024) or StableAdamW (Wortsman et al. 2023)."""

    name: Literal["adamw", "lamb", "muon", "stable_adamw"] = Field(
        "adamw", description="update rule; muon: for the layers' matrices, with adamw for all other parameters"
    )
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    embedding_lr: float = Field(
        1.0,
        ge=0,
        description="factor of the embeddings' learning rate, a tied decoder's weight included; 0 freezes them",
    )
    layer_decay: float = Field(1.0, gt=0, le=1, description="factor of the rate from each layer to the one below")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-6, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.01, ge=0, description="decoupled decay; not applied to LayerNorm and biases")
    clip: float = Field(1.0, ge=0, description="limit of the global gradient norm; 0: no clipping")
    split_qkv: bool = Field(False, description="LAMB: separate trust ratios of queries, keys and values (as NVIDIA)")


class ScheduleConfig(Section):
    """Warm-up, then decay, by updates, tokens or minutes of training; the run ends when the budget is used.

    `wsd` stays at the peak until its decay (Hu et al. 2024, MiniCPM, section 4), which is linear.
    """

    name: Literal["linear", "polynomial", "cosine", "sqrt", "constant", "wsd", "budget"] = Field(
        "linear", description="decay shape; sqrt: 1 - sqrt(progress); budget: linear by minutes"
    )
    by: Literal["steps", "tokens", "minutes"] = Field("steps", description="unit of the budget; minutes if name=budget")
    total_steps: int = Field(
        100_000,
        gt=0,
        description="updates of the run; by tokens or minutes their largest number, without a limit if not set",
    )
    warmup_steps: int = Field(10_000, ge=0, description="updates of linear warm-up; otherwise budget_warmup")
    power: float = Field(1.0, gt=0, description="exponent of the polynomial decay")
    final_ratio: float = Field(0.0, ge=0, le=1, description="final learning rate as a share of the peak")
    decay_share: float = Field(0.2, gt=0, le=1, description="last share of the budget, in which wsd decays")
    budget_minutes: float = Field(0.0, ge=0, description="budget by minutes of training, kept across resumes")
    budget_tokens: int = Field(0, ge=0, description="budget by real tokens, over all ranks")
    budget_warmup: float = Field(0.06, ge=0, lt=1, description="warm-up as a share of a budget of tokens or minutes")

    @model_validator(mode="before")
    @classmethod
    def _no_default_limit(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and (tree.get("by", "steps") != "steps" or tree.get("name") == "budget"):
            return {"total_steps": NO_LIMIT} | dict(tree)
        return tree

    @property
    def unit(self) -> str:
        """Unit of the budget."""
        return "minutes" if self.name == "budget" else self.by

    @property
    def warmup_share(self) -> float:
        """Share of the budget in warm-up."""
        return self.warmup_steps / self.total_steps if self.unit == "steps" else self.budget_warmup


class ZeroConfig(Section):
    """DeepSpeed ZeRO (Rajbhandari et al. 2020)."""

    stage: Literal[0, 1, 2, 3] = Field(1, description="what is partitioned: 1 optimizer, 2 gradients, 3 weights")


class OpsConfig(Section):
    """Backends of the operations; `megabert doctor` shows the choices of `auto` and why."""

    attention: Literal["auto", "sdpa", "varlen", "flash3", "native", "fused_softmax"] = Field(
        "auto",
        description="attention backend; auto: native if the library was built for the device, else varlen, else sdpa; "
        "flash3: FlashAttention-3, with attention_dropout=0",
    )
    mlm_loss: Literal["auto", "torch", "native"] = Field(
        "auto", description="masked-LM loss backend; auto: native, else torch"
    )
    layer: Literal["auto", "torch", "native", "compiled"] = Field(
        "auto",
        description="bias+GELU and dropout+add+LayerNorm; auto: native, else torch; compiled: the whole layer by torch.compile",
    )
    optimizer: Literal["auto", "torch", "apex"] = Field(
        "auto", description="kernels of AdamW or LAMB; apex: NVIDIA's, LAMB only at zero.stage 0, no Muon"
    )


class CheckpointConfig(Section):
    """Intervals of checkpoints, and which are kept. A failed save ends the run."""

    interval: int = Field(1000, ge=0, description="updates between checkpoints; 0: only by minutes, and at the end")
    minutes: float = Field(
        0.0, ge=0, description="minutes of training after which a checkpoint is also due; 0: only by updates"
    )
    keep: int = Field(2, gt=0, description="number of newest committed checkpoints to keep")
    keep_every: int = Field(0, ge=0, description="also keep checkpoints at multiples of this step; 0: none")
    asynchronous: bool = Field(True, description="save in the background from host copies of 12 bytes a parameter")
    mirror: str = Field(
        "",
        description="URL to which checkpoints and logs are copied; a start with an empty run folder copies them back",
    )
    copy_every: int = Field(
        1, gt=0, description="updates between copies of the training state in memory, where ranks restart --in-place"
    )


class EvalConfig(Section):
    """Evaluation on held-out rows, under a fixed mask."""

    interval: int = Field(
        1000,
        ge=0,
        description="updates between held-out evaluations; 0: only before the first and after the last update",
    )
    rows: int = Field(4096, gt=0, description="most held-out rows to evaluate")
    patience: int = Field(
        0,
        ge=0,
        description="consecutive evaluations without a lower loss, in the last phase, that end the run; RUN/best is the best "
        "checkpoint; 0: off",
    )
    rate: float = Field(
        0.0, ge=0, lt=1, description="masking rate of held-out rows, by token; 0: that at the end of the run"
    )
    pairs: str = Field("", description="file or folder of minimal pairs (`megabert pairs`) to score too; empty: none")
    pairs_each: int = Field(20, gt=0, description="pairs of each paradigm to score")


class DistillConfig(Section):
    """Distillation from a teacher: DistilBERT (Sanh et al. 2019, section 3), with the temperature and weights of its released
    training command. The next-sentence loss, if any, has weight 1."""

    teacher: str = Field("", description="run, checkpoint or Hugging Face folder of the teacher; empty: none")
    temperature: float = Field(2.0, gt=0, description="divisor of the logits of both models in the soft loss")
    soft: float = Field(5.0, ge=0, description="weight of KL(teacher || student) x temperature^2")
    mlm: float = Field(2.0, ge=0, description="weight of the language-model loss")
    cosine: float = Field(1.0, ge=0, description="weight of 1 - cosine of the last hidden states")


class SpikesConfig(Section):
    """Losses far above the recent ones. `rollback` is PaLM's recipe (Chowdhery et al. 2022, section 5.1): return to the
    newest checkpoint before the spike and skip the data from there through the spike."""

    policy: Literal["off", "warn", "skip", "rollback"] = Field(
        "warn", description="warn or roll back with the next log line, or skip the update, which synchronises at each"
    )
    threshold: float = Field(10.0, gt=0, description="modified z-score above which a loss is a spike")
    window: int = Field(128, ge=8, description="recent updates to compare a loss with, from a quarter of them on")
    max_rollbacks: int = Field(5, ge=0, description="rollbacks of a process before the run stops")


class WatchdogConfig(Section):
    """Ends a hanging job, and reports slow ranks."""

    timeout_seconds: float = Field(600.0, ge=0, description="seconds without progress that end the job; 0: off")
    slow_ratio: float = Field(
        1.08, gt=1, description="ratio to the ranks' median that names a slow one; 1.08 finds 10% despite noise"
    )
    # shorter causes are temporary: a save in the background, another job's peak on a file system
    slow_minutes: float = Field(
        3.0, gt=0, description="minutes of training over which a rank is slow, and at least 50 updates"
    )


class LogConfig(Section):
    """Intervals of log lines, and sinks besides `metrics.jsonl`."""

    interval: int = Field(10, gt=0, description="updates between log lines, and between readings of the device")
    seconds: float = Field(
        0.0, ge=0, description="least seconds of training between log lines; 0: a line at every interval"
    )
    tensorboard: bool = Field(True, description="write TensorBoard event files into the run's folder")
    wandb: str = Field("", description="project of Weights & Biases for the metrics; empty: none")
    to: list[str] = Field(
        [],
        description="trackers: wandb, mlflow, trackio, each also as NAME=PROJECT, or a class of one's own as package.module:Class",
    )


class Config(Section):
    """All settings of a run. The hash of its canonical JSON is in each checkpoint."""

    seed: int = Field(42, ge=0, description="seed of initialisation, order, masking and dropout")
    deterministic: bool = Field(False, description="reproducible updates, bit for bit, on CUDA too, which are slower")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description="compute type; master weights are fp32; auto: bf16 if the device has bf16 products, else fp32",
    )
    init_from: str = Field("", description="run folder or checkpoint whose weights start this run (phase 2)")
    init_moments: bool = Field(False, description="also load the moments of init_from (as NVIDIA's phase 2)")
    max_bad_steps: int = Field(10, gt=0, description="non-finite updates in a row before the run stops")
    peak_tflops: float = Field(
        0.0,
        ge=0,
        description="peak of matrix products of a device for MFU; 0: the GPU's datasheet, else measured once a machine",
    )
    phases: list[dict[str, Any]] = Field(
        [],
        description="phases of the run in order: each a table with its share of the budget and the keys that it changes, "
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

    @property
    def causal_updates(self) -> bool:
        """Whether any update is causal."""
        maskings = [phase.get("data", {}).get("masking", {}) for phase in self.phases]
        of_phases = any(m.get("strategy") == "causal" or m.get("causal_every") for m in maskings)
        return self.data.masking.causal_part > 0 or self.objective.causal_share > 0 or of_phases

    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()


def validated(tree: Mapping[str, Any], prefix: str = "") -> Config:
    """The config of nested dicts. Raises ValueError naming `prefix` and the first wrong field."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        name = prefix + ".".join(map(str, first["loc"]))
        raise ValueError(f"{name}: {first['msg']} (got {first['input']!r})") from error


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`section.key` -> value."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def check(config: Config) -> None:
    """Raises ValueError naming the first two fields that contradict each other, and what to do."""
    for wrong, message in _contradictions(config):
        if wrong:
            raise ValueError(message)


def _contradictions(config: Config) -> Iterator[tuple[bool, str]]:
    """Whether fields contradict each other, and how."""
    model, masking, schedule = config.model, config.data.masking, config.schedule
    mixing = {
        "objective.causal_share": config.objective.causal_share,
        "data.masking.causal_every": masking.causal_every,
    }
    mixed = [name for name, value in mixing.items() if value]
    causal = f"{mixed[0]} above 0" if mixed else "data.masking.strategy=causal"
    width = f"model.hidden / model.heads = {model.hidden // model.heads}"
    yield model.hidden % model.heads > 0, f"model.heads={model.heads} does not divide model.hidden={model.hidden}"
    groups = f"model.kv_heads={model.key_heads} does not divide model.heads={model.heads}"
    yield model.heads % model.key_heads > 0, groups
    yield model.window % 2 > 0, f"model.window={model.window} is odd; half of it lies on each side of a token"
    longer = f"data.seq_len={config.data.seq_len} is above model.max_positions={model.max_positions}; raise that"
    yield config.data.seq_len > model.max_positions, longer
    no_bias = "model.frequency_bias=true needs a bias of the decoder; set model.decoder_bias=true"
    yield model.frequency_bias and not model.decoder_bias, no_bias
    rotary = "model.neighbour_heads=true needs rotary positions and biases: model.kind=modern and model.bias=true"
    yield model.neighbour_heads and not (model.gated and model.layer_bias), rotary
    few = f"model.neighbour_heads=true needs two heads or more; model.heads={model.heads}"
    yield model.neighbour_heads and model.heads < 2, few
    no_gate = f"model.activation={model.activation} needs model.kind=modern or nomic"
    yield model.activation != "gelu" and not model.gated, no_gate
    yield not model.embedding_norm and not model.modern, "model.embedding_norm=false needs model.kind=modern"
    if model.gated:
        kind, norm = f"model.kind={model.kind}", "pre" if model.modern else "post"
        yield model.norm != norm, f"{kind} needs model.norm={norm}; it is {model.norm}"
        yield model.nsp, f"{kind} needs model.nsp=false; it is true"
        yield model.hidden // model.heads % 2 > 0, f"{kind} turns pairs of columns: {width} is odd"
    yield masking.mask + masking.random > 1, "data.masking.mask + data.masking.random exceed 1"
    every_one = "data.masking.causal_every=1 makes every update causal; set it to 0 and data.masking.strategy to causal"
    yield masking.causal_every == 1, every_one
    compiled = "ops.layer=compiled cannot trace the hooks of zero.stage=3; choose another of the two"
    yield config.ops.layer == "compiled" and config.zero.stage == 3, compiled
    if config.causal_updates:
        no_pair = "[CLS] attends only to itself, so it cannot predict whether B follows A; set model.nsp=false"
        yield model.nsp, f"{causal}: {no_pair}"
    if config.objective.causal_share:
        ends = "objective.causal_share is for runs that end with masked LM"
        yield masking.causal, f"{ends}; set it to 0, or data.masking.strategy to token"
    one = f"{' and '.join(mixed)}: distill.teacher needs one objective throughout; set it to 0"
    yield len(mixed) > 0 and config.distill.teacher != "", one
    never = f"eval.patience={config.eval.patience} counts evaluations; set eval.interval above 0"
    yield config.eval.patience > 0 and not config.eval.interval, never
    unit = "schedule.name=budget" if schedule.name == "budget" else f"schedule.by={schedule.by}"
    for name, budget in (("minutes", schedule.budget_minutes), ("tokens", schedule.budget_tokens)):
        yield schedule.unit == name and not budget, f"{unit} needs schedule.budget_{name} above 0"
    clock = f"deterministic=true: {unit} depends on the clock, so no two runs are equal; choose another"
    yield schedule.unit == "minutes" and config.deterministic, clock
    no_ratios = f"optimizer.split_qkv=true: optimizer.name={config.optimizer.name} has no trust ratios; set it to false"
    yield config.optimizer.split_qkv and config.optimizer.name != "lamb", no_ratios
    too_long = "schedule.warmup_steps exceeds schedule.total_steps; lower it"
    yield schedule.unit == "steps" and schedule.warmup_steps > schedule.total_steps, too_long
    shares = f"schedule.decay_share={schedule.decay_share:g} and a warm-up of {schedule.warmup_share:.2g} of the budget"
    too_much = schedule.name == "wsd" and schedule.warmup_share + schedule.decay_share > 1
    yield too_much, f"{shares} exceed it; lower one of them"

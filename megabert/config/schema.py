"""Schema of a run's configuration: one frozen, typed value whose every key is known and every number checked.

Sources are merged in one order: defaults, preset or TOML file, `section.key=value` overrides. Unknown keys fail with
the nearest match and types are strict. The global batch is the human's number; accumulation is derived, never set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any, Literal

from pydantic import Field, ValidationError

from megabert.common.arguments import PRESETS
from megabert.config import toml_files
from megabert.config.checks import check
from megabert.config.model import ModelConfig, Section
from megabert.config.overrides import refuse_unknown, set_override


class MaskingConfig(Section):
    """Masked language modelling as published: 15% of the tokens, of which 80/10/10 (Devlin et al. 2019, section 3.1)."""

    strategy: Literal["token", "word", "span", "causal"] = Field(
        "token",
        description="unit that is masked; causal: nothing is, each token predicts the next from those before it",
    )
    rate: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="share of the maskable tokens that is predicted; causal predicts all and needs none of these",
    )
    final_rate: float = Field(
        0.0, ge=0, lt=1, description="rate that the run ends with, reached evenly from `rate`; 0 keeps `rate`"
    )
    mask: float = Field(0.8, ge=0, le=1, description="share of the predicted tokens shown as [MASK]")
    random: float = Field(0.1, ge=0, le=1, description="share of the predicted tokens shown as a random token")
    max_predictions: int = Field(0, ge=0, description="prediction slots a row; 0 means ceil(rate x seq_len) + 1")

    @property
    def causal(self) -> bool:
        """Whether a token may see only what is before it."""
        return self.strategy == "causal"


class ObjectiveConfig(Section):
    """What updates train, by the share of the run's budget used before them. Evaluation is masked LM all the same."""

    causal_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the budget trained left to right, before masked LM (Gisserot-Boukhlef et al. 2025)",
    )


class DataConfig(Section):
    """Where rows come from."""

    path: str = Field("", description="dataset folder written by data_prep, or its URL (also --data)")
    mix: dict[str, float] = Field(
        {}, description='other dataset folders and their shares of all rows: {"data/books" = 0.3}'
    )
    workers: int = Field(2, ge=0, description="loader processes a rank; 0 loads in the training process")
    prefetch: int = Field(4, gt=0, description="micro-batches each worker keeps ready")
    on_damage: Literal["stop", "skip"] = Field(
        "stop", description="at a damaged row: stop every rank, or leave the row out and count it"
    )
    masking: MaskingConfig = MaskingConfig()


class BatchConfig(Section):
    """Rows an update takes, and rows a device takes at once."""

    global_size: int = Field(256, gt=0, description="rows of one update over all ranks and micro-steps")
    micro_size: int = Field(32, gt=0, description="rows of one forward and backward pass on one rank, at most")


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019), LAMB (You et al. 2020) or Muon (Jordan et al. 2024)."""

    name: Literal["adamw", "lamb", "muon"] = Field(
        "adamw", description="update rule; muon: of the layers' matrices, adamw's of all other parameters"
    )
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-6, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.01, ge=0, description="decoupled decay; LayerNorm and biases never decay")
    clip: float = Field(1.0, ge=0, description="global gradient-norm limit; 0 turns clipping off")
    split_qkv: bool = Field(
        False,
        description="LAMB: trust ratios of their own for queries, keys and values, as in NVIDIA's recipe; false: one",
    )


class ScheduleConfig(Section):
    """Warm-up, then decay, by updates, tokens or minutes of training; the run ends when these are used up.

    `wsd` stays at the peak until its decay (Hu et al. 2024, MiniCPM, section 4), which is linear.
    """

    name: Literal["linear", "polynomial", "cosine", "constant", "wsd", "budget"] = Field(
        "linear", description="decay shape; budget: linear by minutes"
    )
    by: Literal["steps", "tokens", "minutes"] = Field(
        "steps", description="what the budget is counted in; budget counts minutes"
    )
    total_steps: int = Field(100_000, gt=0, description="updates in the run; at most so many by tokens or minutes")
    warmup_steps: int = Field(
        10_000, ge=0, description="updates of linear warm-up; by tokens and minutes see budget_warmup"
    )
    power: float = Field(1.0, gt=0, description="exponent of the polynomial decay")
    final_ratio: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a share of the peak")
    decay_share: float = Field(0.2, gt=0, le=1, description="share of the budget in which wsd decays, the last one")
    budget_minutes: float = Field(0.0, ge=0, description="training time by minutes, kept across resumes")
    budget_tokens: int = Field(0, ge=0, description="real tokens of the run by tokens, over all ranks")
    budget_warmup: float = Field(
        0.06, ge=0, lt=1, description="share of the budget spent in warm-up, by tokens and minutes"
    )

    @property
    def unit(self) -> str:
        """What the budget is counted in."""
        return "minutes" if self.name == "budget" else self.by

    @property
    def warmup_share(self) -> float:
        """Share of the budget spent in warm-up."""
        return self.warmup_steps / self.total_steps if self.unit == "steps" else self.budget_warmup


class ZeroConfig(Section):
    """DeepSpeed ZeRO (Rajbhandari et al. 2020)."""

    stage: Literal[0, 1, 2, 3] = Field(1, description="what is partitioned: 1 optimizer, 2 gradients, 3 weights")
    offload: Literal["none", "cpu"] = Field("none", description="where optimizer state lives")


class OpsConfig(Section):
    """Which implementation each operation uses; `megabert.commands.doctor` shows what `auto` picks and why."""

    attention: Literal["auto", "sdpa", "varlen", "cudnn", "native", "fused_softmax"] = Field(
        "auto", description="attention backend; auto: on CUDA the fastest right one, measured at the run's start"
    )
    mlm_loss: Literal["auto", "torch", "native"] = Field("auto", description="masked-LM loss backend; auto as above")
    layer: Literal["auto", "torch", "native", "compiled"] = Field(
        "auto", description="bias+GELU and dropout+add+LayerNorm; compiled: the whole layer by torch.compile"
    )
    optimizer: Literal["auto", "torch", "apex"] = Field(
        "auto", description="kernels of AdamW or LAMB; apex: NVIDIA's, LAMB's at zero.stage 0 only, no Muon"
    )


class CheckpointConfig(Section):
    """When the run is saved, what stays, and what a save that fails does."""

    interval: int = Field(1000, gt=0, description="updates between checkpoints")
    keep: int = Field(2, gt=0, description="committed checkpoints kept, the newest ones")
    keep_every: int = Field(
        0, ge=0, description="checkpoints whose step is a multiple of it are kept for ever; 0 keeps none"
    )
    asynchronous: bool = Field(
        True,
        description="write and commit in the background, from copies in host memory: 12 bytes a parameter over all ranks",
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="after a save that failed: end the run, or warn and go on from the one before"
    )


class EvalConfig(Section):
    interval: int = Field(1000, ge=0, description="updates between held-out evaluations; 0 only at the end")
    rows: int = Field(4096, gt=0, description="held-out rows evaluated at most")
    rate: float = Field(
        0.0, ge=0, lt=1, description="masking rate of held-out rows; 0 is the one that the run ends with"
    )


class DistillConfig(Section):
    """A student learns from a teacher beside the text: DistilBERT (Sanh et al. 2019, section 3), with the temperature and
    weights of its released training command. The next-sentence loss, where there is one, has weight 1."""

    teacher: str = Field("", description="run, checkpoint or Hugging Face folder to learn from; empty: none")
    temperature: float = Field(2.0, gt=0, description="both sides' logits are divided by it in the soft loss")
    soft: float = Field(5.0, ge=0, description="weight of KL(teacher || student) x temperature^2")
    mlm: float = Field(2.0, ge=0, description="weight of the language-model loss itself")
    cosine: float = Field(1.0, ge=0, description="weight of 1 - cosine of the last hidden states")


class SpikesConfig(Section):
    """Losses far above the recent ones. `rollback` is PaLM's recipe (Chowdhery et al. 2022, section 5.1): go back to the
    newest checkpoint before the spike and pass over the data from there through the spike."""

    policy: Literal["off", "warn", "skip", "rollback"] = Field(
        "warn",
        description="say so (with the next log line), do not apply the update, or go back and pass over; the last two wait "
        "for each loss",
    )
    threshold: float = Field(10.0, gt=0, description="modified z-score above which a loss is a spike")
    window: int = Field(128, ge=8, description="recent updates a loss is compared with; judged from a quarter on")
    max_rollbacks: int = Field(5, ge=0, description="rollbacks of one process before the run stops")


class WatchdogConfig(Section):
    timeout_seconds: float = Field(
        600.0, ge=0, description="without progress on a rank for so long the job names the failed rank and ends; 0 off"
    )


class LogConfig(Section):
    interval: int = Field(10, gt=0, description="updates between log lines; nothing is read from the device in between")
    tensorboard: bool = Field(True, description="write TensorBoard event files into the run's folder")
    wandb: str = Field("", description="project of Weights & Biases that figures also go to; empty: none")
    mlflow: str = Field("", description="experiment of MLflow that figures also go to; empty: none")


class Config(Section):
    """Everything that decides a run. Its canonical JSON is hashed into each checkpoint."""

    seed: int = Field(42, ge=0, description="seed of initialisation, order, masking and dropout")
    deterministic: bool = Field(
        False, description="updates repeat bit for bit on CUDA too, more slowly; on the CPU they always do"
    )
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = Field(
        "auto",
        description="compute type; master weights are fp32; auto: bf16 where the device multiplies it, else fp16 on a GPU, fp32 "
        "on a CPU; fp8: bf16, and the products of the inner layers' linears in FP8",
    )
    init_from: str = Field("", description="run folder or checkpoint whose weights start this run (phase 2)")
    init_moments: bool = Field(
        False,
        description="take over the optimizer's moments of init_from too, their bias correction begun anew, as NVIDIA's phase 2",
    )
    max_bad_steps: int = Field(10, gt=0, description="non-finite updates in a row before the run stops")
    peak_tflops: float = Field(0.0, ge=0, description="matrix-product ceiling a device for MFU; 0 measures it")
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
        """Whether any update is left to right."""
        return self.data.masking.causal or self.objective.causal_share > 0

    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()


def load(source: str = "", overrides: list[str] | None = None) -> Config:
    """Config from a preset name or TOML path, then `section.key=value` strings.

    Raises ValueError naming the file or key and what to do.
    """
    tree: dict[str, Any] = {}
    if source:
        _, tree = toml_files.read(source, PRESETS, "--config", "preset")
    for override in overrides or []:
        set_override(Config, tree, override)
    return from_dict(tree)


def from_arguments(args: argparse.Namespace) -> Config:
    """The config that `common.arguments.add_config_options` asked for. Raises ValueError naming the option, key or value that
    is wrong."""
    data = [f"data.path={args.data}"] if args.data else []
    return load(args.config, data + args.overrides)


def from_dict(tree: dict[str, Any]) -> Config:
    """Validated config from nested dicts."""
    refuse_unknown(Config, tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']} (got {first['input']!r})") from error
    check(config)
    return config

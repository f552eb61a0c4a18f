"""Schema of the model, the section of a configuration that a checkpoint's weights fit."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VOCAB_MULTIPLE = 128  # the embedding is padded to this, so that matrix products have aligned shapes


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(Section):
    """The encoder's shape. BASE is 12 layers, 768, 12 heads; LARGE is 24, 1024, 16 (Devlin et al. 2019)."""

    kind: Literal["bert", "modern"] = Field(
        "bert",
        description="modern: rotary positions, a gated feed-forward layer, no segments (Warner et al. 2024, "
        "ModernBERT); with norm=pre and nsp=false",
    )
    layers: int = Field(12, gt=0, description="number of encoder layers")
    hidden: int = Field(768, gt=0, description="width of the residual stream")
    heads: int = Field(12, gt=0, description="attention heads; must divide hidden")
    intermediate: int = Field(
        0,
        ge=0,
        description="width of the feed-forward layer; 0 means 4 x hidden, gated 8/3 x hidden in steps of 64: as many weights",
    )
    vocab_size: int = Field(0, ge=0, description="tokenizer entries; 0 takes the dataset's tokenizer")
    max_positions: int = Field(512, gt=0, description="tokens of a sequence at most; bert learns a position for each")
    norm: Literal["post", "pre"] = Field("post", description="LayerNorm after (published) or before each block")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout on embeddings and block outputs")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="dropout on attention probabilities")
    layer_norm_eps: float = Field(1e-12, gt=0, description="added to the variance in LayerNorm")
    init_std: float = Field(0.02, gt=0, description="standard deviation of the truncated-normal initialisation")
    nsp: bool = Field(True, description="train the next-sentence head")
    tied: bool = Field(True, description="the decoder's weights are the word embedding's")
    zero_init: bool = Field(
        False,
        description="the projections back into the residual stream start at zero, so that layers start as nothing",
    )
    frequency_bias: bool = Field(
        False, description="the decoder's bias starts at the log-frequencies of the dataset's tokens"
    )
    activation_checkpointing: bool = Field(False, description="recompute each layer in backward to save memory")

    @property
    def ffn(self) -> int:
        gated = max(1, round(8 * self.hidden / 3 / 64)) * 64
        return self.intermediate or (gated if self.modern else 4 * self.hidden)

    @property
    def ffn_inputs(self) -> int:
        """Columns of the feed-forward layer's first product: the gate's too."""
        return 2 * self.ffn if self.modern else self.ffn

    @property
    def modern(self) -> bool:
        return self.kind == "modern"

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

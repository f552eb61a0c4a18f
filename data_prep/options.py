"""Every choice that changes a build's bytes is here, checked before anything is read, and goes into the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from data_prep.problems import BadInput
from data_prep.sources import ReadOptions

BLOCK_ROWS = 256


@dataclass(frozen=True)
class BuildOptions:
    """Options of `data_prep build` but its inputs, output and number of workers."""

    seq_len: int = 128  # tokens a row
    max_sequences: int = (
        0  # sequences packed in a row at most; 0 chooses by the corpus (shuffle.choose_slots)
    )
    nsp: bool = True  # sentence pairs; without, full sentences
    short_share: float = 0.1  # of pairs that aim at a shorter, uniform length
    held_out: float = 0.01  # of documents, by a hash of their text
    seed: int = 0
    vocab_size: int = 30_000
    model_type: str = "unigram"
    lowercase: bool = False
    sample_megabytes: int = 20  # text the tokenizer is trained on
    rows_per_shard: int = 65_536
    on_error: str = "stop"
    read: ReadOptions = field(default_factory=ReadOptions)

    def check(self) -> None:
        """Raises BadInput naming the option that is out of range."""
        for name, low, high in (
            ("seq_len", 8, 8192),
            ("max_sequences", 0, 64),
            ("short_share", 0, 1),
            ("held_out", 0, 0.5),
            ("seed", 0, 2**32 - 1),
            ("vocab_size", 16, 1_000_000),
            ("sample_megabytes", 1, 200),
            ("rows_per_shard", BLOCK_ROWS, 1 << 24),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadInput(f"--{name.replace('_', '-')}: must lie in {low}..{high}, is {value}")
        if self.rows_per_shard % BLOCK_ROWS:
            raise BadInput(f"--rows-per-shard: must be a multiple of {BLOCK_ROWS}, is {self.rows_per_shard}")

    def manifest(self, trained: bool) -> dict[str, Any]:
        """As the manifest lists it; a reused tokenizer makes the options of its training void."""
        listed = asdict(self)
        if not trained:
            for name in ("vocab_size", "model_type", "lowercase", "sample_megabytes"):
                del listed[name]
        return listed

"""Share of [UNK] among the texts that a trained model is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megabert.common.logs import log
from megabert.data.tokenizer import Tokenizer

# share of a file's tokens above which it is worth a warning
MOST_UNKNOWN = 0.01


@dataclass
class UnknownTokens:
    """Share of [UNK] among the tokens of a file or another source of texts."""

    tokenizer: Tokenizer
    unknown: int = 0
    tokens: int = 0

    def add(self, rows: Iterable[Sequence[int] | np.ndarray]) -> UnknownTokens:
        """Count the tokens of texts, given as ids; none if the tokenizer has no token for unknown ones."""
        for ids in rows if self.tokenizer.unk_id != self.tokenizer.pad_id else ():
            self.unknown += int(np.equal(ids, self.tokenizer.unk_id).sum())
            self.tokens += len(ids)
        return self

    def warn(self, source: object) -> None:
        """Log the share of `source` if it is above MOST_UNKNOWN."""
        if self.unknown > MOST_UNKNOWN * self.tokens:
            log.warning(
                f"{source}: {self.unknown / self.tokens:.1%} of its tokens are {self.tokenizer.tokens[self.tokenizer.unk_id].strip()}: "
                f"{self.tokenizer.path} lacks their characters; take a model with a tokenizer that has them"
            )

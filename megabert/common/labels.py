"""The label of a position without prediction: torch's own `ignore_index`, and `kIgnore` of csrc/mlm_loss/options.h."""

from __future__ import annotations

IGNORE = -100

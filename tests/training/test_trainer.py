"""What the ranks agree on after an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from megabert.common.errors import FAILED, USER_ERROR, exit_code
from megabert.training.trainer import refuse


@dataclass
class Ranks:
    """What `World.gather` would give."""

    reports: list[Any]
    size: int = 3

    def gather(self, own: Any) -> list[Any]:
        return self.reports


@pytest.mark.parametrize(
    ("reports", "code", "text"),
    [
        ([["", 0], ["a row is damaged", USER_ERROR], ["", 0]], USER_ERROR, "rank 1: a row is damaged"),
        ([["", 0], ["", 0], ["Input/output error", FAILED]], FAILED, "rank 2: Input/output error"),
        ([["no such file", USER_ERROR], ["", 0], ["Stale file handle", FAILED]], FAILED, "rank 2: Stale"),
    ],
)
def test_a_fault_that_one_rank_saw_is_started_again_and_a_mistake_is_not(reports, code, text) -> None:
    with pytest.raises(ValueError, match=text) as found:
        refuse(Ranks(reports), "", 0)  # type: ignore[arg-type]
    assert exit_code(found.value) == code
    refuse(Ranks([["", 0]] * 3), "", 0)  # type: ignore[arg-type]

"""Results of threads that work ahead."""

import pytest

from megabert.common.streaming import in_order


def test_results_of_threads_come_in_order() -> None:
    def square(n: int) -> int:
        if n == 30:
            raise ValueError("thirty")
        return n * n

    found, taken = [], []
    with pytest.raises(ValueError, match="thirty"):
        for value in in_order(square, (taken.append(n) or n for n in range(1000)), 3, 4):
            found.append(value)
            assert len(taken) <= len(found) + 4
    assert found == [n * n for n in range(30)] and len(taken) <= 35

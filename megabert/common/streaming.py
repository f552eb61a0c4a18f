"""Ordered results from threads that compute ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    function: Callable[[T], R],
    items: Iterable[T],
    threads: int,
    waiting: int,
    begin: Callable[[], object] = lambda: None,
) -> Generator[R, None, None]:
    """`function(item)` of each item in their order, computed by `threads` threads that are at most `waiting` items ahead.

    `items` is iterated in the caller's thread. Each thread calls `begin` first. An exception of `function` is raised here, and later
    items are not started.
    """
    queue: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        try:
            for item in items:
                queue.append(pool.submit(function, item))
                if len(queue) > waiting:
                    yield queue.popleft().result()
            while queue:
                yield queue.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

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
    """Yield `function(item)` in the order of `items`, computed by `threads` threads at most `waiting` items ahead.

    `items` is iterated in the caller's thread. Each thread first calls `begin`. An exception of `function` is raised
    here, and items that are not running yet are cancelled.
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

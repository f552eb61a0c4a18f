"""Workers of a Ray cluster: an item of work is a Ray task of one CPU. Only this file imports ray.

Ray runs an item again whose node is lost. Two attempts at an item write the same bytes, and a file has its name once it is complete.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.common.errors import BadInput, Unfinished, WorkerDied
from data_prep.executor import output_folder
from data_prep.executor.pool import Pool, collect_garbage_rarely
from megabert.common.environment import ROOT, end_with_parent, host_name, raise_descriptor_limit, require_packages
from megabert.common.errors import Failed, describe, exit_on_ctrl_c


class WorkerContext(NamedTuple):
    """What a worker checks on its node: `folder`, the command's working directory; `seen`, a probe file in the work
    folder; `code`, the code versions of the build."""

    folder: str
    seen: str
    code: tuple[tuple[str, str | None], ...]


@functools.cache
def _check_node(place: WorkerContext) -> None:
    """First call in a worker. Raises Unfinished on a node that does not see the command's folders or has other code."""
    collect_garbage_rarely()
    raise_descriptor_limit()  # a stage maps two files of every task of reading
    end_with_parent()  # the parent is the node's raylet; Ray reruns the items of a lost node elsewhere
    node = f"--executor ray: node {host_name()}"
    if not os.path.isdir(place.folder):
        raise Unfinished(f"{node} does not see {place.folder}; start the command in a folder that all nodes share")
    os.chdir(place.folder)
    if not os.path.exists(place.seen):
        work = os.path.dirname(place.seen)
        raise Unfinished(f"{node} does not see {work}; name an --output on a file system that all nodes share")
    if changed := "; ".join(output_folder.differences(dict(place.code), output_folder.code())):
        raise Unfinished(f"{node} runs different code ({changed}); install the same version there")


def _run_item(place: WorkerContext, function: Callable[[Any], Any], item: Any) -> tuple[Any, Exception | None]:
    """The result of an item, or its error, which Ray would wrap in one of its own. Runs in a worker."""
    try:
        _check_node(place)
        return function(item), None
    except Exception as error:
        error.add_note(traceback.format_exc())
        return None, error


class RayExecutor(ThreadPoolExecutor):
    """At most `size` Ray tasks at a time, with a thread that waits for each."""

    def __init__(self, size: int, folder: Path) -> None:
        import ray

        super().__init__(size)
        self._seen = Path(folder.absolute(), output_folder.WORK, f"ray-{secrets.token_hex(4)}")
        self._place = WorkerContext(os.getcwd(), str(self._seen), tuple(output_folder.code().items()))
        self._task = ray.remote(num_cpus=1)(_run_item)
        self._running: set[Any] = set()
        self._cancelled = False

    def submit(self, function: Callable[..., Any], /, *items: Any, **_: Any) -> Future[Any]:
        """The future of `function(item)`. The work folder exists."""
        self._seen.touch()
        return super().submit(self._result, function, *items)

    def cancel(self) -> None:
        """Kill the processes of the running tasks, which `wait` for their futures then waits for, and start no other task."""
        import ray

        self._cancelled = True
        for task in list(self._running):
            ray.cancel(task, force=True)

    def _result(self, function: Callable[[Any], Any], item: Any) -> Any:
        import ray

        task = self._task.remote(self._place, function, item)
        self._running.add(task)
        if self._cancelled:
            ray.cancel(task, force=True)
        try:
            result, error = ray.get(task)
        except ray.exceptions.RayError as failure:
            # of an error outside the item, such as in its unpickling, the last line of a traceback
            line = str(failure).strip().splitlines()[-1 if isinstance(failure, ray.exceptions.RayTaskError) else 0]
            raise WorkerDied(f"--executor ray: {line.rstrip('.')}; the same command resumes") from failure
        finally:
            self._running.discard(task)
        if error is not None:
            raise error
        return result


def _address() -> str:
    """Host and port of the cluster of this machine or of RAY_ADDRESS. Raises BadInput without one, Failed if it does not answer, for
    which Ray would wait minutes."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        address: str | None = canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError):
        address = None
    if address is None:
        raise BadInput(
            f"--executor ray: found no Ray cluster on this machine (RAY_ADDRESS is {os.environ.get('RAY_ADDRESS') or 'not set'}); start "
            "one, or join one by `ray start --address=HOST:PORT`"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise Failed(f"--executor ray: the cluster at {address} does not answer ({describe(error)})") from None
    return address


@contextlib.contextmanager
def opened(workers: int | None, folder: Path) -> Iterator[Pool]:
    """`workers` CPUs of a running Ray cluster (default: all), whose nodes share `folder`, that of the output.

    Raises ValueError without the package or a cluster. An item on a node that has other code or other files raises Unfinished.
    """
    require_packages("--executor ray", "ray", "ray")
    # read at the import: no usage statistics, and no warning of older releases about GPUs
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        os.environ.setdefault(name, "0")
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    # a task has one core
    environment = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with exit_on_ctrl_c():
            import ray

            ray.init(
                address=_address(),
                runtime_env={"env_vars": environment},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except RuntimeError as error:  # other versions of Ray or Python, no process of the cluster on this machine
        raise BadInput(f"--executor ray: {' '.join(str(error).split())}") from None
    signal.signal(signal.SIGTERM, terminate)
    try:
        size = workers or int(ray.cluster_resources().get("CPU", 0))
        if not size:
            raise BadInput(
                "--executor ray: the cluster has no CPUs; add nodes, or set --workers to the CPUs that will join later"
            )
        with RayExecutor(size, folder) as executor:
            yield Pool(size, executor, cancel=executor.cancel)
    finally:
        ray.shutdown()

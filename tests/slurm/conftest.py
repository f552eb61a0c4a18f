"""One SLURM a session."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The session's cluster; a test leaves no job to the next one."""
    yield running_cluster
    running_cluster.cancel_all()

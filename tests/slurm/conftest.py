"""The datasets of the integration tests, and one SLURM a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.conftest import corpus, dataset  # noqa: F401 - fixtures
from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running

"""The corpus and the dataset that the integration tests use."""

from __future__ import annotations

from tests.integration.conftest import corpus, dataset

__all__ = ["corpus", "dataset"]

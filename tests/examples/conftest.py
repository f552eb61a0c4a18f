"""The datasets of the integration tests."""

from tests.integration.conftest import corpus, dataset  # noqa: F401 - fixtures

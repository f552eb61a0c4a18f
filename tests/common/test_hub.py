"""Copies of models in a store."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from megabert.common import storage
from megabert.common.hub import copied
from tests.helpers.object_store import Proxy

pytest.importorskip("s3fs")


def test_processes_that_start_together_share_a_copy(proxy: Proxy) -> None:
    url, names = "s3://shelf/model", ["config.json", "model.safetensors"]
    for name in names:
        storage.write(f"{url}/{name}", name.encode())
    proxy.delay = 0.05
    with ThreadPoolExecutor(4) as threads:
        (folder,) = {*threads.map(lambda _: copied(url), range(4))}
    assert sorted(path.name for path in folder.iterdir()) == names and list(folder.parent.iterdir()) == [folder]
    assert [(folder / name).read_text() for name in names] == names

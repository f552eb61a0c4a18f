"""Copies of models in a store."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import huggingface_hub
import pytest

from megabert.common import storage
from megabert.common.errors import Failed, exit_code
from megabert.common.hub import download_folder, model_folder
from tests.helpers.object_store import Proxy

pytest.importorskip("s3fs")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "best/model.safetensors", "pytorch_model.bin"])
def test_a_model_in_a_store_is_known_by_its_weights(name: str, proxy: Proxy) -> None:
    """Of several files, of a fine-tuning run, or of an older one."""
    storage.write(f"s3://shelf/{name}/{name}", b"{}")
    assert (download_folder(f"s3://shelf/{name}") / name).read_text() == "{}"


def test_a_proxy_that_refuses_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = type("ProxyError", (Exception,), {"__module__": "httpx"})("403 Forbidden")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=refused))
    with pytest.raises(
        Failed, match=r"^a/b: no such folder, and the hub cannot be reached \(ProxyError: 403 Forbidden\)"
    ):
        model_folder("a/b")


@pytest.mark.parametrize(
    ("status", "code", "said"), [(404, 2, "no public model"), (403, 2, "no public model"), (503, 4, "answers with 503")]
)
def test_an_overloaded_hub_is_a_failure(status, code, said, monkeypatch) -> None:
    answer = httpx.Response(status, request=httpx.Request("GET", "https://hub/a/b"))
    refused = huggingface_hub.errors.HfHubHTTPError("refused", response=answer)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=refused))
    with pytest.raises((ValueError, Failed), match=rf"^a/b: no such folder, and the hub .*{said}") as caught:
        model_folder("a/b")
    assert exit_code(caught.value) == code


def test_processes_that_start_together_share_a_copy(proxy: Proxy) -> None:
    url, names = "s3://shelf/model", ["config.json", "model.safetensors"]
    for name in names:
        storage.write(f"{url}/{name}", name.encode())
    proxy.delay = 0.05
    with ThreadPoolExecutor(4) as threads:
        (folder,) = {*threads.map(lambda _: download_folder(url), range(4))}
    assert sorted(path.name for path in folder.iterdir()) == names and list(folder.parent.iterdir()) == [folder]
    assert [(folder / name).read_text() for name in names] == names

"""Copies of models in a store."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import huggingface_hub
import pytest

from megabert.common import storage
from megabert.common.errors import Failed, exit_code
from megabert.hf.hub import download_folder, model_folder
from tests.helpers.hub import PUBLIC, _HubRequests
from tests.helpers.object_store import PASS, Proxy

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


@pytest.mark.parametrize("of", ["/api/", "resolve"])
def test_a_restricted_dataset_is_a_mistake(of, model_hub, monkeypatch) -> None:
    """The hub lists some restricted datasets, and refuses their files."""
    model_hub.add("datasets/a/texts", PUBLIC, {"x.txt": b"text"})
    monkeypatch.setattr(_HubRequests, "refused", lambda asked, path: of in path and not asked.missing("GatedRepo", 403))
    with pytest.raises(ValueError, match=r"^hf://datasets/a/texts/x\.txt: the hub restricts access"):
        storage.read("hf://datasets/a/texts/x.txt")


def test_a_model_that_lacks_bytes_is_class_4(model_hub, monkeypatch) -> None:
    model_hub.add("models/a/b", PUBLIC, {"model.safetensors": b"weights"})
    whole = _HubRequests.answer

    def cut(asked, body, headers=None, status=200) -> None:
        body = body[:3] if "resolve" in asked.path and asked.command == "GET" else body
        whole(asked, body, headers, status)

    monkeypatch.setattr(_HubRequests, "answer", cut)
    with pytest.raises(Failed, match=r"^a/b: .* cannot be reached \(OSError: Consistency check failed: [^\n]*$"):
        model_folder("a/b")


def test_processes_that_start_together_share_a_copy(proxy: Proxy) -> None:
    url, names = "s3://shelf/model", ["config.json", "model.safetensors"]
    for name in names:
        storage.write(f"{url}/{name}", name.encode())
    proxy.delay = 0.05
    with ThreadPoolExecutor(4) as threads:
        (folder,) = {*threads.map(lambda _: download_folder(url), range(4))}
    assert sorted(path.name for path in folder.iterdir()) == names and list(folder.parent.iterdir()) == [folder]
    assert [(folder / name).read_text() for name in names] == names


def test_weights_that_change_while_they_are_copied_are_refused(proxy: Proxy, monkeypatch) -> None:
    url = "s3://shelf/changing/model.safetensors"
    monkeypatch.setattr(storage, "CHUNK_BYTES", 2)

    def change(method: str, path: str, number: int) -> str:
        if method == "GET" and path.endswith("model.safetensors"):
            proxy.fault = lambda *_: PASS
            storage.write(url, b"new!")
        return PASS

    storage.write(url, b"old.")
    proxy.fault = change
    with pytest.raises(ValueError, match=f"^{url}: changed while it was copied"):
        download_folder("s3://shelf/changing")
    assert (download_folder("s3://shelf/changing") / "model.safetensors").read_bytes() == b"new!"


def test_a_checkpoint_that_its_run_removes_meanwhile_is_class_4(proxy: Proxy) -> None:
    step = "s3://shelf/training/checkpoints/step-00000001"
    for name in ("manifest.json", "weights.safetensors"):
        storage.write(f"{step}/{name}", b"{}")

    def remove(method: str, path: str, number: int) -> str:
        if method == "GET" and path.endswith("manifest.json"):
            proxy.fault = lambda *_: PASS
            storage.remove(f"{step}/weights.safetensors")
        return PASS

    proxy.fault = remove
    with pytest.raises(Failed, match=f"^{step}/weights.safetensors: was removed while it was copied"):
        download_folder("s3://shelf/training")


def test_a_hub_model_without_weights_is_named(model_hub) -> None:
    """Also where the cache has its tokenizer alone, and the hub, which has the weights, cannot be reached."""
    model_hub.add("models/a/flax", PUBLIC, {"config.json": b"{}", "flax_model.msgpack": b"weights"})
    model_hub.add("models/a/b", PUBLIC, {"vocab.txt": b"[PAD]", "model.safetensors": b"weights"})
    with pytest.raises(ValueError, match=r"^a/flax: .* the hub has no model\.safetensors and no pytorch_model\.bin"):
        model_folder("a/flax")
    huggingface_hub.hf_hub_download("a/b", "vocab.txt")
    model_hub.close()
    with pytest.raises(Failed, match=r"^a/b: no such folder, and the hub cannot be reached"):
        model_folder("a/b")


def test_offline_mode_is_refused_at_once(model_hub, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^hf://datasets/a/texts/x\.txt: refused .*offline mode is enabled"):
        storage.read("hf://datasets/a/texts/x.txt")

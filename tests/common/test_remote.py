"""Files at URLs: what is there, parts of them, faults of the network, and packages that are missing."""

import importlib
import sys
from pathlib import Path

import pytest

from megabert.common import errors, remote
from megabert.common.errors import FAILED, USER_ERROR, Failed, describe, exit_code
from tests.helpers.web import serving


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setattr(errors, "WAITS", (0.0, 0.0, 0.0))
    with serving() as found:
        yield found


def put(name, data):
    import fsspec

    fsspec.filesystem("memory").pipe(name, data)


def test_urls_and_paths_are_distinguished():
    assert remote.is_url("s3://bucket/key") and remote.is_url("https://host/x?a=b")
    for path in ("data/x", "/data/x", "pipe:cat /etc/passwd", "simplecache::s3://b/k", "C:/x", ""):
        assert not remote.is_url(path)


def test_parents_and_children_of_urls():
    assert remote.parent("s3://bucket/a/b/") == "s3://bucket/a" and remote.parent("s3://bucket/a") == "s3://bucket"
    assert remote.parent("s3://bucket") == "s3://bucket"
    assert remote.below("s3://bucket/", "a", "b") == "s3://bucket/a/b" and remote.below("d", "a") == Path("d/a")


def test_sequential_reads_use_growing_ranges(web):
    data = bytes(range(256)) * (12 << 12)  # 12 MiB
    web.files["/big.bin"] = data
    with remote.opened(f"{web.url}/big.bin") as file:
        assert file.read(5) == data[:5]
        assert web.asked == [("/big.bin", 0, remote.FIRST)]
        assert file.read() == data[5:]
        sizes = [end - first for _, first, end in web.asked]
        assert sizes == [1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22, (12 << 20) - sum(sizes[:5])]
        file.seek(1000)
        assert file.read(3) == data[1000:1003]
        assert web.asked[-1] == ("/big.bin", 1000, 1000 + remote.FIRST)
        assert file.seek(-2, 2) == len(data) - 2 and file.read() == data[-2:] and file.read() == b""


def test_network_failures_are_retried(web):
    web.files["/a"] = b"text"
    web.faults = [503, 500, 503]
    assert remote.read_whole(f"{web.url}/a") == b"text"
    web.faults = [503] * 4
    with pytest.raises(Failed) as failed:
        remote.read_whole(f"{web.url}/a")
    assert exit_code(failed.value) == FAILED
    assert describe(failed.value).startswith(f"{web.url}/a: 503")
    assert web.faults == []


def test_a_failing_server_does_not_mean_missing(web):
    web.files["/a"], web.heads = b"text", True
    for faults in ([503] * 2, [503] * 7):  # a HEAD and a GET each try
        web.faults = faults
        assert remote.exists(f"{web.url}/a") and web.faults == []
    web.faults = [503] * 8
    with pytest.raises(Failed, match="503"):
        remote.exists(f"{web.url}/a")
    with pytest.raises(Failed):
        remote.read_whole("http://127.0.0.1:9/a")  # where nobody listens
    web.faults = [403] * 2
    with pytest.raises(PermissionError):
        remote.exists(f"{web.url}/a")
    assert not remote.exists(f"{web.url}/b")


def test_missing_and_forbidden_files_raise_at_once(web):
    with pytest.raises(FileNotFoundError) as missing:
        remote.read_whole(f"{web.url}/a")
    assert describe(missing.value) == f"{web.url}/a: no such file or folder"
    web.files["/a"] = b"text"
    web.faults = [403, 503]
    with pytest.raises(PermissionError) as refused:
        remote.read_whole(f"{web.url}/a")
    assert exit_code(refused.value) == USER_ERROR and describe(refused.value).startswith(f"{web.url}/a: no p")
    assert web.faults == [503]


def test_the_stamp_changes_with_the_content(web):
    web.files["/a"] = b"text"
    before = remote.status(f"{web.url}/a")
    assert before == remote.status(f"{web.url}/a") and before.size == 4
    web.files["/a"] = b"tixt"
    assert remote.status(f"{web.url}/a").stamp != before.stamp


def test_a_server_without_ranges_serves_small_files(web):
    web.ranges = False
    web.files |= {"/a": bytes(1000), "/b": bytes(1 << 20)}
    assert remote.read_whole(f"{web.url}/a") == bytes(1000)
    with pytest.raises(ValueError, match=r"/b: The HTTP server doesn't appear to support range requests"):
        remote.read_whole(f"{web.url}/b")


def test_folders_and_globs(web):
    web.files |= {"/c/b.txt": b"b", "/c/a.txt": b"a", "/c/x.md": b"x"}
    assert remote.names(f"{web.url}/c/") == {"a.txt": False, "b.txt": False, "x.md": False}
    assert list(remote.matching(f"{web.url}/c/*.txt")) == [f"{web.url}/c/a.txt", f"{web.url}/c/b.txt"]
    put("/remote-globs/d/b.txt", b"b")
    put("/remote-globs/.h/c.txt", b"b")
    put("/remote-globs/a.txt", b"b")
    assert remote.names("memory://remote-globs") == {".h": True, "a.txt": False, "d": True}
    assert remote.matching("memory://remote-globs/*") == {
        "memory://remote-globs/a.txt": False,
        "memory://remote-globs/d": True,
    }


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://b/k", "s3://b/k: s3:// takes a package of its own: pip install s3fs"),
        ("gs://b/k", "gs://b/k: gs:// takes a package of its own: pip install gcsfs"),
        ("https://h/k", "https://h/k: https:// takes a package of its own: pip install aiohttp"),
    ],
)
def test_a_missing_package_is_named(url, message, monkeypatch):
    for module in ("s3fs", "gcsfs", "fsspec.implementations.http"):
        monkeypatch.setitem(sys.modules, module, None)
    registry = importlib.import_module("fsspec.registry")  # what it has imported stays known to it
    for protocol in ("s3", "gs", "https"):
        monkeypatch.delitem(registry._registry, protocol, raising=False)
    with pytest.raises(ValueError) as refused:
        remote.status(url)
    assert str(refused.value) == message


def test_without_fsspec_urls_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"^s3://b/k: URLs take fsspec: pip install fsspec s3fs$"):
        remote.status("s3://b/k")


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ValueError, match=r"^nope://x: Protocol not known: nope"):
        remote.status("nope://x")

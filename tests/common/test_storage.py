"""Objects of a store: moto's S3 server as a process, behind a proxy that fails."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megabert.common import errors, storage
from megabert.common.errors import Failed
from tests.helpers.object_store import DROP, KEYS, PASS, TRUNCATE, UNAVAILABLE, Proxy

pytest.importorskip("s3fs")
DATA = bytes(range(256)) * 8_000


def test_objects_are_written_listed_read_and_removed(proxy: Proxy, tmp_path: Path) -> None:
    for name in ("b/two.txt", "a.txt", "b/deep/three.bin"):
        storage.write(f"s3://shelf/list/{name}", name.encode())
    (tmp_path / "file").write_bytes(DATA)
    storage.put(tmp_path / "file", "s3://shelf/list/b/one.bin")
    names = ["a.txt", "b/deep/three.bin", "b/one.bin", "b/two.txt"]
    assert [found.url for found in storage.find("s3://shelf/list")] == [f"s3://shelf/list/{name}" for name in names]
    assert [found.url for found in storage.find("s3://shelf/list/**/*.bin")] == [
        "s3://shelf/list/b/deep/three.bin", "s3://shelf/list/b/one.bin",
    ]  # fmt: skip
    assert storage.find("s3://shelf/list/a.txt") == [storage.stat("s3://shelf/list/a.txt")]
    assert storage.find("s3://shelf/nothing") == storage.find("s3://shelf/list/*.none") == []
    assert storage.read("s3://shelf/list/b/one.bin") == DATA
    assert storage.fetch("s3://shelf/list/b/one.bin", tmp_path / "copy") == hashlib.sha256(DATA).hexdigest()
    assert (tmp_path / "copy").read_bytes() == DATA
    with storage.open_object("s3://shelf/list/b/one.bin") as file:
        assert (file.seek(-300, os.SEEK_END), file.read(), file.read(1)) == (len(DATA) - 300, DATA[-300:], b"")
        file.seek(1_000_001)
        assert file.read(700_000) == DATA[1_000_001:1_700_001]
    storage.remove("s3://shelf/list/a.txt")
    storage.remove("s3://shelf/list/a.txt")
    with pytest.raises(FileNotFoundError):
        storage.stat("s3://shelf/list/a.txt")
    with pytest.raises(FileNotFoundError):
        storage.open_object("s3://shelf/list")


def test_a_version_changes_with_the_content_alone(proxy: Proxy) -> None:
    storage.write("s3://shelf/version", b"one")
    before = storage.stat("s3://shelf/version")
    assert storage.stat("s3://shelf/version") == before
    storage.write("s3://shelf/version", b"two")
    after = storage.stat("s3://shelf/version")
    assert after.size == before.size and after.stamp != before.stamp


def test_of_two_that_create_an_object_one_does(proxy: Proxy) -> None:
    made = []
    threads = [
        threading.Thread(target=lambda n=n: made.append((storage.create("s3://shelf/lock", b"%d" % n), n)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [n for won, n in made if won]
    assert len(made) == 8 and len(owners) == 1
    assert storage.read("s3://shelf/lock") == b"%d" % owners[0]
    storage.remove("s3://shelf/lock")


@pytest.mark.parametrize("what", [DROP, UNAVAILABLE, TRUNCATE])
def test_a_fifth_of_the_requests_fails_and_no_byte_is_lost(proxy: Proxy, tmp_path: Path, what: str) -> None:
    url = f"s3://shelf/faults/{what}"
    proxy.fault = lambda method, path, number: what if zlib.crc32(b"%d" % number) % 5 == 0 else PASS
    (tmp_path / "file").write_bytes(DATA)
    storage.put(tmp_path / "file", url)
    with storage.open_object(url) as file:
        assert file.read() == DATA
    storage.fetch(url, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert url in [found.url for found in storage.find("s3://shelf/faults/*")]
    assert proxy.failed[what] >= 1


def test_a_store_that_is_gone_is_a_failure_of_the_machine(proxy: Proxy, tmp_path: Path) -> None:
    storage.write("s3://shelf/gone", DATA)
    proxy.fault = lambda method, path, number: DROP
    with pytest.raises(Failed, match=r"^s3://shelf/gone: ") as caught:
        storage.fetch("s3://shelf/gone", tmp_path / "copy")
    assert errors.exit_code(caught.value) == errors.FAILED
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "a path, or a URL with"),
        ("nothing://x/y", "a path, or a URL with"),
        ("az://box/y", "pip install adlfs"),
    ],
)
def test_what_no_store_is_meant_by_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        storage.stat(url)


def test_missing_credentials_are_one_line(s3_port: int, tmp_path: Path) -> None:
    script = "from megabert.common import storage, errors; errors.command(lambda _: storage.stat('s3://shelf/x'))()"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")} | {
        "HOME": str(tmp_path), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_port}", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=120)
    assert len(done.stderr.splitlines()) == 1
    assert "s3://shelf/x: no credentials" in done.stderr


@pytest.mark.parametrize(
    ("status", "wanted"), [(404, FileNotFoundError), (403, ValueError), (401, ValueError), (500, Failed)]
)
def test_answers_of_a_web_server(status: int, wanted: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(storage, "WAITS", (0.01,))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(
        wanted, match="http://127.0.0.1:.*/text.txt" if wanted is not FileNotFoundError else "no such object"
    ):
        storage.stat(f"http://127.0.0.1:{server.server_port}/text.txt")
    server.shutdown()
    server.server_close()


def test_a_web_server_is_read_in_ranges(tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_bytes(DATA)
    asked: list[str] = []

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = (tmp_path / self.path.lstrip("/")).read_bytes()
            start, end = 0, len(data)
            if (header := self.headers.get("Range")) is not None:
                asked.append(header)
                start, end = (int(part) for part in header.removeprefix("bytes=").split("-"))
                end += 1
            self.send_response(206 if header else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", '"1"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data[start:end])

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/text.bin"
    with storage.open_object(url) as file:
        file.seek(1_000_000)
        assert file.read(10) == DATA[1_000_000:1_000_010]
    assert asked == [f"bytes=1000000-{len(DATA) - 1}"]
    assert storage.find(url) == [storage.stat(url)] and storage.stat(url).version == '"1"'
    server.shutdown()
    server.server_close()


def test_a_local_path_imports_none_of_it(tmp_path: Path) -> None:
    script = (
        "import sys; from data_prep.readers import files; files.status(sys.argv[1]); "
        "print([m for m in ('fsspec', 's3fs', 'aiohttp', 'huggingface_hub') if m in sys.modules])"
    )
    (tmp_path / "text").write_text("x")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "text")], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr

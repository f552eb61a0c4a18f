"""Objects of a store: moto's S3 server as a process, behind a proxy that fails."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megabert.common import errors, logs, storage
from megabert.common.errors import Failed
from tests.helpers import web_folder
from tests.helpers.object_store import BARE, DROP, EXPIRED, KEYS, PASS, TRUNCATE, UNAVAILABLE, Proxy

pytest.importorskip("s3fs")
DATA = bytes(range(256)) * 8_000


def test_objects_are_written_listed_read_and_removed(proxy: Proxy, tmp_path: Path) -> None:
    for name in ("b/two.txt", "a.txt", "b/deep/three.bin"):
        storage.write(f"s3://shelf/list/{name}", name.encode())
    (tmp_path / "file").write_bytes(DATA)
    storage.put(tmp_path / "file", "s3://shelf/list/b/one.bin")
    names = ["a.txt", "b/deep/three.bin", "b/one.bin", "b/two.txt"]
    assert [found.url for found in storage.find("s3://shelf/list")] == [f"s3://shelf/list/{name}" for name in names]
    binary = [found.url for found in storage.find("s3://shelf/list/**/*.bin")]
    assert binary == ["s3://shelf/list/b/deep/three.bin", "s3://shelf/list/b/one.bin"]
    assert storage.find("s3://shelf/list/a.txt") == [storage.stat("s3://shelf/list/a.txt")]
    assert storage.find("s3://shelf/nothing") == storage.find("s3://shelf/list/*.none") == []
    assert storage.read("s3://shelf/list/b/one.bin") == DATA
    assert storage.fetch("s3://shelf/list/b/one.bin", tmp_path / "copy") == hashlib.sha256(DATA).hexdigest()
    assert (tmp_path / "copy").read_bytes() == DATA
    with storage.open_object("s3://shelf/list/b/one.bin") as file:
        assert (file.seek(-300, os.SEEK_END), file.read(), file.read(1)) == (len(DATA) - 300, DATA[-300:], b"")
        file.seek(1_000_001)
        assert file.read(700_000) == DATA[1_000_001:1_700_001]
        with pytest.raises(OSError, match="Invalid argument"):  # as of a file
            file.seek(-len(DATA) - 1, os.SEEK_END)
    for _ in range(2):
        storage.remove("s3://shelf/list/a.txt")
    for ask, name in ((storage.stat, "list/a.txt"), (storage.open_object, "list")):
        with pytest.raises(FileNotFoundError):
            ask(f"s3://shelf/{name}")


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_glob_leaves_out_no_folder_whose_list_failed(failing: int, proxy: Proxy) -> None:
    names = ["a/1.txt", "b/2.txt", "b/c/3.txt"]
    for name in (*names, "a/4.md"):
        storage.write(f"s3://shelf/globbed/{name}", b"text")
    lists = 0

    def fail_one(method: str, path: str, number: int) -> str:
        nonlocal lists
        lists += "list-type" in path
        return UNAVAILABLE if "list-type" in path and lists == failing + 1 else PASS

    proxy.fault = fail_one
    assert [found.url.partition("globbed/")[2] for found in storage.find("s3://shelf/globbed/*/*.txt")] == names[:2]


def test_an_object_is_found_by_a_name_with_brackets(proxy: Proxy) -> None:
    for name in ("[1].txt", "1.txt"):
        storage.write(f"s3://shelf/brackets/{name}", b"text")
        assert storage.find("s3://shelf/brackets/[1].txt") == [storage.stat("s3://shelf/brackets/[1].txt")]


def test_a_missing_bucket_is_named_so(proxy: Proxy) -> None:
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        storage.write("s3://no-such-bucket/x", b"")


def test_a_version_changes_with_the_content_alone(proxy: Proxy) -> None:
    storage.write("s3://shelf/version", b"one")
    before = storage.stat("s3://shelf/version")
    assert storage.stat("s3://shelf/version") == before
    storage.write("s3://shelf/version", b"two")
    after = storage.stat("s3://shelf/version")
    assert after.size == before.size and after.stamp != before.stamp


@pytest.mark.parametrize("answer", [PASS, BARE])
def test_of_two_that_create_an_object_one_does(answer, proxy):
    proxy.fault = lambda method, path, number: answer
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda n: storage.create("s3://shelf/lock", b"%d" % n), range(8)))
    assert won.count(True) == 1 and storage.read("s3://shelf/lock") == b"%d" % won.index(True)
    storage.remove("s3://shelf/lock")


@pytest.mark.parametrize(
    "what", [DROP, *(pytest.param(what, marks=pytest.mark.slow) for what in (UNAVAILABLE, TRUNCATE))]
)
def test_failing_requests_lose_no_byte(proxy: Proxy, tmp_path: Path, what: str) -> None:
    url = f"s3://shelf/faults/{what}"
    proxy.fault = lambda method, path, number: what if zlib.crc32(b"%d" % number) % 5 == 0 else PASS
    (tmp_path / "file").write_bytes(DATA)
    parts: list[int] = []
    storage.put(tmp_path / "file", url, lambda: parts.append(1))
    assert parts
    with storage.open_object(url) as file:
        assert file.read() == DATA
    storage.fetch(url, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert url in [found.url for found in storage.find("s3://shelf/faults/*")]
    assert proxy.failed[what] >= 1


def test_a_store_that_is_gone_is_class_4(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WAITS", (0.01,))
    storage.write("s3://shelf/gone", DATA)
    proxy.fault = lambda method, path, number: DROP
    with pytest.raises(Failed, match=r"^s3://shelf/gone: ") as caught:
        storage.fetch("s3://shelf/gone", tmp_path / "copy")
    assert errors.exit_code(caught.value) == errors.FAILED
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_no_store_is_meant_by_is_refused():
    unknown = "unsupported URL scheme"
    for url, message in (("file:///etc", unknown), ("nothing://x/y", unknown), ("az://box/y", "pip install adlfs")):
        with pytest.raises(ValueError, match=message):
            storage.stat(url)


def test_missing_credentials_are_one_line(s3_port, tmp_path):
    script = "from megabert.common import storage, errors; errors.command(lambda _: storage.stat('s3://shelf/x'))()"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")} | {
        "HOME": str(tmp_path), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_port}", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=120)
    assert len(done.stderr.splitlines()) == 1 and "s3://shelf/x: no credentials" in done.stderr


@pytest.mark.parametrize(
    ("status", "wanted", "message"),
    [
        (404, FileNotFoundError, "no such object"),
        (200, ValueError, "no size, or Content-Encoding; download it"),
        *((status, ValueError, "http://127.0.0.1:.*/text.bin") for status in (403, 401)),
        (500, Failed, "http://127.0.0.1:.*/text.bin"),
    ],
)
def test_answers_of_a_web_server(status, wanted, message, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.01,))
    (tmp_path / "text.bin").write_bytes(DATA)
    behaviour = {"encoding": "gzip"} if status == 200 else {"status": status}
    with web_folder.serve(tmp_path, **behaviour) as server, pytest.raises(wanted, match=message):
        storage.stat(f"{server}/text.bin")


def test_a_web_server_is_read_in_ranges(tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_bytes(DATA)
    asked: list[str] = []
    with web_folder.serve(tmp_path, tag='"1"', asked=asked) as server:
        url = f"{server}/text.bin"
        with storage.open_object(url) as file:
            file.seek(1_000_000)
            assert file.read(10) == DATA[1_000_000:1_000_010]
        assert asked == [f"bytes=1000000-{len(DATA) - 1}"]
        assert storage.find(url) == [storage.stat(url)] and storage.stat(url).version == '"1"'


def test_a_query_of_a_web_address_is_no_wildcard(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text")
    with web_folder.serve(tmp_path) as server:
        for query in ("?download=true", "?X-Amz-Signature=a[b"):
            url = f"{server}/a.txt{query}"
            assert storage.find(url) == [storage.stat(url)] and storage.read(url) == b"text"
    # brackets around an IPv6 address are none either
    assert storage.glob_folder("http://[::1]:80/a/b*.txt") == "http://[::1]:80/a"
    assert storage.glob_folder("http://[::1]:80/a/b.txt") == storage.glob_folder("https://h/a?b=*") == ""
    assert storage.glob_folder("s3://shelf/a/b?.txt") == "s3://shelf/a"


def test_links_that_lead_elsewhere_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "texts/deep").mkdir(parents=True)
    for name in ("style.css", "texts/a.txt", "texts/c&d.txt", "texts/deep/b.txt"):
        (tmp_path / name).write_bytes(b"text")
    with web_folder.serve(tmp_path) as server:
        found = [f"{server}/texts/{name}" for name in ("a.txt", "c&d.txt", "deep/b.txt")]
        assert [each.url for each in storage.find(f"{server}/texts/")] == found
        assert list(storage.list_objects(f"{server}/texts")) == ["a.txt", "c&d.txt", "deep/b.txt"]
        assert [each.url for each in storage.find(f"{server}/texts/*")] == found[:2]


def test_a_time_of_change_is_a_version(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    with web_folder.serve(tmp_path) as server:
        before = storage.stat(f"{server}/a.bin")
        (tmp_path / "a.bin").write_bytes(b"2")
        os.utime(tmp_path / "a.bin", (0, 1_000_000))
        assert storage.stat(f"{server}/a.bin").version != before.version != ""


def test_web_servers_send_parts_of_a_text(tmp_path: Path) -> None:
    """As nginx, which sends whole files to who takes them compressed."""
    (tmp_path / "a.txt").write_bytes(DATA)
    with web_folder.serve(tmp_path, packs=True) as server, storage.open_object(f"{server}/a.txt") as file:
        file.seek(1_000)
        assert file.read(10) == DATA[1_000:1_010]


def test_an_answer_that_is_not_http_is_class_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WAITS", (0.01,))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(4):  # a HEAD and a GET for each try
                with server.accept()[0] as client:
                    client.recv(1 << 16)
                    client.sendall(b"none of HTTP\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Failed, match="Bad status line"):
            storage.stat(f"http://127.0.0.1:{server.getsockname()[1]}/a.bin")


def test_an_expired_token_is_a_refused_access(proxy: Proxy) -> None:
    """S3 answers a HEAD with 400, without a reason. The next request reads the credentials again."""
    storage.write("s3://shelf/expired", DATA)
    before, _ = storage._system("s3://shelf/expired")
    storage.stat("s3://shelf/expired")
    proxy.fault = lambda method, path, number: EXPIRED
    with pytest.raises(storage.AccessDenied, match="access denied; check the credentials"):
        storage.stat("s3://shelf/expired")
    assert proxy.failed[EXPIRED] <= 2  # s3fs then looks for a folder
    assert storage._system("s3://shelf/expired")[0] is not before


def test_a_login_that_is_refused_later_is_a_refused_access(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Google's, which is a request of its own, after the credentials have expired."""
    storage.write("s3://shelf/login", DATA)
    storage.stat("s3://shelf/login")

    def refuse(url: str) -> Any:
        raise PermissionError("Reauthentication is needed")

    monkeypatch.setattr(storage, "_system", refuse)
    with pytest.raises(storage.AccessDenied, match="access denied; check the credentials"):
        storage.stat("s3://shelf/login")


def test_a_name_that_no_store_has_is_a_mistake(proxy: Proxy) -> None:
    with pytest.raises(ValueError, match=r"s3://No_Bucket!/x: refused \(.*Invalid bucket name"):
        storage.find("s3://No_Bucket!/x")


def test_a_server_that_takes_no_files_is_refused(tmp_path: Path) -> None:
    with web_folder.serve(tmp_path) as server:
        for change in (lambda url: storage.write(url, b"x"), storage.remove):
            with pytest.raises(ValueError, match=r"/a\.bin: (refused \(501|its server cannot be written to)"):
                change(f"{server}/a.bin")


def test_a_server_without_ranges_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    with web_folder.serve(tmp_path, ranges=False) as server:
        assert storage.read(f"{server}/a.bin") == DATA
        with (
            storage.open_object(f"{server}/a.bin") as file,
            pytest.raises(ValueError, match="sends no parts of a file"),
        ):
            file.seek(1_000)
            file.read(10)


def test_a_server_that_does_not_answer_is_class_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Before, a warning says that it is waited for."""
    import aiohttp

    monkeypatch.setattr(storage, "WAITS", (0.01,))
    patience = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.5)}}
    monkeypatch.setitem(storage.PROXIES, "http", patience)
    monkeypatch.setattr(storage, "PATIENCE", (0.1, 0.1))
    with web_folder.serve(tmp_path, stalls="a.bin") as server, pytest.raises(Failed, match=r"a\.bin: TimeoutError"):
        storage.stat(f"{server}/a.bin")
    assert caplog.messages[0] == f"{server}/a.bin: still waiting for the store"


def test_messages_have_no_secrets(tmp_path: Path) -> None:
    assert storage.public("https://me:word@h:1/a/b?sig=word#x") == "https://h:1/a/b"
    assert storage.public("s3://shelf/a?b") == "s3://shelf/a?b" and storage.public("a?b@c") == "a?b@c"
    with web_folder.serve(tmp_path, status=403) as server, pytest.raises(ValueError, match="access denied") as caught:
        storage.stat(server.replace("//", "//me:word@") + "/text.bin?sig=word")
    assert "word" not in str(caught.value)
    of_text = (
        "a 'http://me:word@h/b?sig=word': gone, https://h/c?sig=word=: gone (https://h/d?a=word); why? x@y s3://s/a?b"
    )
    assert logs.hide_secrets(of_text) == "a 'http://h/b': gone, https://h/c: gone (https://h/d); why? x@y s3://s/a?b"


def test_a_local_path_imports_none_of_it(tmp_path: Path) -> None:
    script = (
        "import sys; from data_prep.readers import files; files.status(sys.argv[1]); "
        "print([m for m in ('fsspec', 's3fs', 'aiohttp', 'huggingface_hub') if m in sys.modules])"
    )
    (tmp_path / "text").write_text("x")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "text")], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_names_that_lead_out_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are copied to files by their names, also those of a store that somebody else writes."""
    found = [storage.Object(f"s3://shelf/run/{name}", 1, "") for name in ("../x", "a/../../x", "/etc/x", "a/x..y")]
    monkeypatch.setattr(storage, "find", lambda url: found)
    assert storage.list_objects("s3://shelf/run") == {"a/x..y": found[-1]}

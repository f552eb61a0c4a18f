"""Lists of hosts and URLs: hosts stand for what is below them, URLs for one page, and lines that are neither are named."""

import gzip

import numpy as np
import pytest

from data_prep.common.errors import BadInput
from data_prep.filters.url_lists import ListedUrls, UrlList

LIST = """\
# hosts as UT1's domains file has them
example.com
.dot.org
*.star.net   # and what is below
127.0.0.9
Bücher.example

http://page.org/a/b?c=d#e
page.org/slash/
//page.org:8080/port
https://root.org/
"""
DROPPED = [
    "https://example.com", "http://www.EXAMPLE.com:80/x?y#z", "example.com/a", "https://user@a.b.example.com./",
    "http://dot.org/", "http://x.star.net/", "http://127.0.0.9/a", "https://xn--bcher-kva.example/", "//bücher.example/x",
    "https://page.org/a/b?c=d", "http://page.org:80/a/b?c=d#other", "https://page.org/slash", "http://page.org:8080/port/",
    "http://root.org", "https://root.org/#top",
]  # fmt: skip
KEPT = [
    "https://example.com.org/", "http://notexample.com/", "http://page.org/", "http://page.org/a/b", "http://page.org/a/b?c=e",
    "http://sub.page.org/slash", "http://page.org/port", "http://root.org/x", "http://10.127.0.0.org/", "u", "", "http://com/",
    "http://other.org/?u=http://example.com/",
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_hosts_and_pages_are_found_and_nothing_else(packed, tmp_path):
    path = tmp_path / "list"
    path.write_bytes(gzip.compress(LIST.encode()) if packed else LIST.encode())
    listed = ListedUrls(np.unique(UrlList.of(str(path)).keys()))
    assert [url for url in DROPPED if url not in listed] == []
    assert [url for url in KEPT if url in listed] == []


def test_mistakes_are_named(tmp_path):
    path = tmp_path / "list"
    for data, said in (
        (b"# nothing\n\n", "holds no host and no URL; give one a line"),
        (b"a.org\n0.0.0.0 b.org\n", r"line 2: '0.0.0.0 b.org' is neither a host nor a URL"),
        (b"me@a.org\n", "line 1: 'me@a.org' is neither"),
        (gzip.compress(b"a.org\n" * 99)[:-9], "damaged gzip data"),
    ):
        path.write_bytes(data)
        with pytest.raises(BadInput, match=f"--drop-urls {path}: {said}"):
            UrlList.of(str(path)).keys()
    with pytest.raises(BadInput, match="gone: can't be read: No such file"):
        UrlList.of(f"{tmp_path}/gone")

"""Which files an input names, and files that change or cannot be read."""

import gzip
import os
import shutil
from functools import partial

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.readers import files, tasks
from data_prep.readers.documents import read_documents
from data_prep.readers.tasks import group, list_ranges
from megabert.common import storage
from tests.helpers.prep_reading import plan, read_all, write_all
from tests.integration.conftest import command


def make(folder, *names):
    return write_all(folder, {name: os.fsencode(name) for name in names})


def distinct_names(folder, item):
    return [os.path.relpath(path, folder) for path in files.expand(str(item), Problems("stop"), files.InputNotices())]


def test_folders_are_walked_once_in_order(tmp_path):
    make(tmp_path, "in/b/2.txt", "in/b/1.txt", "in/a.txt", "in/.hidden/x.txt", "in/b/.x", "other/o.txt")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "other")
    for name in ("loop", "b/up", "b/again"):
        (tmp_path / "in" / name).symlink_to(tmp_path / "in")
    assert distinct_names(tmp_path, tmp_path / "in") == ["in/a.txt", "in/b/1.txt", "in/b/2.txt", "in/linked/o.txt"]
    make(tmp_path, "in/b/c.md")
    assert distinct_names(tmp_path, tmp_path / "i*" / "**" / "*.txt") == ["in/a.txt", "in/b/1.txt", "in/b/2.txt"]
    # sorted by whole paths
    folder = make(tmp_path / "more", "a/x", "a.txt", "a-b/y/1", "a-b/y.txt", "b", "ä/1", "a/\udcff.txt")
    want = ["a-b/y.txt", "a-b/y/1", "a.txt", "a/x", "a/\udcff.txt", "b", "ä/1"]
    assert distinct_names(folder, f"{folder}/") == want
    assert [part.path for part in plan([folder])[0].ranges] == [str(folder / name) for name in want]


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        ("*", "a b n.txt"),
        ("*/", "a b"),
        ("?/x.txt", "a/x.txt b/x.txt"),
        ("a/.*", "a/.h.txt"),
        ("[ab]//*", "a/x.txt b/c b/x.txt"),
        (".d/*", ".d/z.txt"),
        ("**/*.txt", "a/x.txt b/c/y.txt b/x.txt n.txt"),
        ("b/**/y.txt", "b/c/y.txt"),
        ("n.txt/*", ""),
        ("**", ""),
        ("**/.d/*", ""),
        ("none/*", ""),
    ],
)
def test_globs_match_what_a_shell_matches(pattern, want, tmp_path, monkeypatch):
    make(tmp_path, "a/x.txt", "a/.h.txt", "b/x.txt", "b/c/y.txt", "n.txt", ".d/z.txt")
    monkeypatch.chdir(tmp_path)
    for top in ("", f"{tmp_path}/"):
        if want:
            assert files.matches(top + pattern, Problems("stop")) == [top + name for name in want.split()]
        else:
            with pytest.raises(BadInput, match="no file matches it"):
                files.matches(top + pattern, Problems("stop"))


def test_globs_of_urls_leave_out_hidden_objects_alone(monkeypatch):
    names = ("a.txt", "part1.txt", ".part2.txt", ".trash/b.txt", "part3.txt", "sub/part4.txt")
    every = [storage.Object(f"s3://texts/in/{name}", 1, "") for name in names]
    monkeypatch.setattr(storage, "find", lambda url: every)
    for pattern in ("in", "in/", "in/*.txt", "in/?????.txt", "i*/**"):
        urls = files.expand(f"s3://texts/{pattern}", Problems("stop"), files.InputNotices())
        found = [url.partition("/in/")[2] for url in urls]
        assert found == ["a.txt", "part1.txt", "part3.txt", "sub/part4.txt"]


def test_files_of_many_folders_are_seen_once():
    seen, paths = files.SeenFiles(), [f"/{i % 200}/{i}" for i in range(1000)]
    assert [seen.add(path) for path in paths * 2] == [True] * 1000 + [False] * 1000


MANY_FILES = """
import re, zlib
from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.readers import files, tasks

files.expand = lambda item, problems, notices: (f"/text/{i // 100:05}/article-{i:09}.txt" for i in range(int(item)))
digits = lambda path: zlib.crc32(path.encode()) * 1_000_003
files.status = lambda path: (digits(path) % 20_000 + 1, 1_700_000_000_000_000_000 + digits(path) % (1 << 50))
for count in (10_000, 100_000):
    planned = tasks.group(tasks.list_ranges([Corpus("input", (str(count),))], ReadOptions(), Problems("stop")))
    assert sum(len(task.ranges) for task in planned) == count
    print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""


def test_a_listed_file_costs_few_bytes():
    """Of 100,000 files and their tasks, above 10,000: bytes a file at the peak, beside those of its name."""
    done = command("-c", MANY_FILES)
    assert done.returncode == 0, done.stderr[-2000:]
    few, many = map(int, done.stdout.split())
    assert (many - few) / 90_000 < 90 + len("/text/00000/article-000000000.txt")


def test_links_pipes_and_devices_are_never_opened(tmp_path, monkeypatch):
    for name, target in (("self.txt", tmp_path / "self.txt"), ("gone.txt", "nowhere"), ("device.txt", "/dev/zero")):
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe.txt")
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more))
    for name, reason in (
        ("self.txt", "can't be read: Too many levels of symbolic links"),
        ("gone.txt", "can't be read: No such file"),
        ("pipe.txt", "not a regular file"),
        ("device.txt", "not a regular file"),
    ):
        with pytest.raises(BadInput, match=f"{name}: {reason}"):
            plan([tmp_path / name])
    problems = Problems("skip")
    assert plan([tmp_path], problems) == [] == opened
    assert problems.counts == {"unreadable file": 2, "unknown format": 2}


def test_a_file_or_a_folder_without_permission(tmp_path, monkeypatch):
    """Root may read everything, so the refusal is made."""
    make(tmp_path, "in/a.txt", "in/shut/b.txt", "in/locked.txt")

    def forbid(real, path, *rest, **more):
        if os.path.basename(path) in ("shut", "locked.txt"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "scandir", partial(forbid, os.scandir))
    monkeypatch.setattr(os, "open", partial(forbid, os.open))
    for path, name in ((tmp_path, "in/shut"), (tmp_path / "in" / "locked.txt", r"locked\.txt")):
        with pytest.raises(BadInput, match=f"{name}: can't be read: Permission denied"):
            read_all([path])
    for glob in ("*/*/*.txt", "**/*.txt"):
        with pytest.raises(BadInput, match="in/shut: can't be read: Permission denied"):
            read_all([tmp_path / glob])
    found, problems = read_all([tmp_path], "skip")
    assert found == ["in/a.txt"] and problems.counts == {"unreadable folder": 1, "unreadable file": 1}


@pytest.mark.parametrize("change", ["grow", "shrink", "replace", "vanish"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["txt", "gz"])
def test_file_changed_while_reading_is_named(change, pack, tmp_path):
    path, copy = tmp_path / "f", tmp_path / "copy"
    content = pack(b"".join(b"Line %d of a file.\n" % i for i in range(200_000)))
    message = r"changed while it was read \(\d+ bytes" if change != "vanish" else "can't be read: No such file"
    alter = {
        "grow": lambda: path.write_bytes(content + pack(b"more")),
        "shrink": lambda: os.truncate(path, len(content) // 2),
        "replace": lambda: (copy.write_bytes(content), shutil.move(copy, path)),
        "vanish": path.unlink,
    }[change]

    def read(problems, when):
        """Read the file, which changes before or after its sixth document."""
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
        (task,) = plan([path])
        if when == "before":
            alter()
        for i, _ in enumerate(read_documents(next(iter(task.ranges)), ReadOptions(text_documents="line"), problems)):
            if i == 5 and when == "while":
                alter()
        return problems

    for when in ("before", "while"):
        with pytest.raises(BadInput, match=message):
            read(Problems("stop"), when)
        assert sum(read(Problems("skip"), when).counts.values()) == 1


def test_task_never_mixes_corpora(tmp_path):
    make(tmp_path, *(f"{name}/{i}.txt" for name in "abc" for i in range(3)))
    corpora = [Corpus("one", (f"{tmp_path}/a", f"{tmp_path}/b/1.txt")), Corpus("two", (f"{tmp_path}/b",))]
    corpora.append(Corpus("three", (f"{tmp_path}/b/0.txt", f"{tmp_path}/c"), weight=2.0))
    planned = group(list_ranges(corpora, ReadOptions(), Problems("stop")))
    read = [(task.index, task.corpus, [os.path.relpath(p.path, tmp_path) for p in task.ranges]) for task in planned]
    one, two = ["a/0.txt", "a/1.txt", "a/2.txt", "b/1.txt"], ["b/0.txt", "b/2.txt"]
    assert read == [(0, 0, one), (1, 1, two), (2, 2, [f"c/{i}.txt" for i in range(3)])]


def test_tasks_grow_with_the_corpus(tmp_path, monkeypatch):
    write_all(tmp_path, {f"{i:03}.txt": b"x" * 100 for i in range(400)})
    monkeypatch.setattr(tasks, "TASK_BYTES", (200, 2000))
    for most, planned in ((tasks.TASKS, 200), (50, 50), (2, 20)):
        monkeypatch.setattr(tasks, "TASKS", most)
        assert len(plan([tmp_path])) == planned


def test_invalid_bytes_are_replaced_in_every_format(tmp_path):
    column = pa.array([b"Caf\xe9 5."], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    page = b"<mediawiki><page><title>T</title><ns>0</ns><text>Caf\xe9 4.</text></page></mediawiki>"
    files = {"a.csv": b"text\nCaf\xe9 1.\n", "b.json": b'{"text": "Caf\xe9 2."}\n', "c.tsv": b"text\nCaf\xe9 3.\n"}
    write_all(tmp_path, files | {"d.xml": page})
    found, problems = read_all([tmp_path], encoding_errors="replace")
    assert sorted(found) == [f"Caf\ufffd {i}." for i in range(1, 6)]
    assert problems.counts == {"invalid UTF-8 replaced": 5}
    found, problems = read_all([tmp_path], "skip")
    assert not found and problems.counts == {"invalid UTF-8": 4, "bad page": 1}

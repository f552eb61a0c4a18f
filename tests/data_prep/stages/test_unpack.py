"""A large file gives the same rows whatever it is packed in."""

import bz2
import json
import os
import shutil
from unittest.mock import Mock

import pytest

from data_prep import build as building
from data_prep.build import BuildPlan, build
from data_prep.common.errors import BadInput, Problems, Unfinished
from data_prep.common.records import Corpus, FileRange, ReadOptions
from data_prep.executor import journal, output_folder
from data_prep.executor.output_folder import SPOOLS, remove_others
from data_prep.executor.pool import Pool
from data_prep.options import BuildOptions
from data_prep.readers import decompress, documents, tasks
from data_prep.stages.unpack import PackedFile, unpack
from megabert.data.tokenizer import Tokenizer
from tests.helpers.prep_reading import PACK, contents, write


def by_streams(data):
    return b"".join(bz2.compress(data[i : i + 30_000]) for i in range(0, len(data), 30_000))


# bzip2 of blocks of 100 KB
PACKERS = PACK | {"bz2": lambda data: bz2.compress(data, 1), "bz2 of streams": by_streams}
MAKE = {
    "text": lambda i, text: text.replace("\n\n", "\n") + "\n\n",
    "jsonl": lambda i, text: json.dumps({"text": text}, ensure_ascii=False) + "\n",
    "wiki": lambda i, text: f'<doc id="{i}" title="Ä">\nÄ\n\n{text}\n</doc>\n',
}


def make(kind, texts):
    return "".join(MAKE[kind](i, text) for i, text in enumerate(texts)).encode()


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr(tasks, "RANGE_BYTES", 1 << 17)
    monkeypatch.setattr(tasks, "TASK_BYTES", (1 << 16, 1 << 18))
    monkeypatch.setitem(decompress.COMPRESSIONS, "bz2", decompress.COMPRESSIONS["bz2"]._replace(feed=4_096))


@pytest.fixture
def run(tokenizer_file, tmp_path):
    """Build paths into a folder of a name: the summary, and the bytes of the shards."""

    def run(name, *paths, on_error="stop", train=False, **options):
        given = BuildOptions(held_out=0.02, rows_per_shard=256, **options)
        corpus, tokenizer = Corpus("input", tuple(map(str, paths))), None if train else Tokenizer.load(tokenizer_file)
        plan = BuildPlan([corpus], tmp_path / name, given, tokenizer, on_error)
        summary = build(plan, Pool(1), progress=False)
        assert not (plan.folder / ".work").exists()
        return summary, {path.relative_to(plan.folder): path.read_bytes() for path in plan.folder.rglob("*.tar")}

    return run


@pytest.mark.parametrize("kind", MAKE)
def test_packed_file_gives_the_same_rows(kind, topics, run, tmp_path):
    data = make(kind, topics[:60])
    options = {"format": kind, "text_documents": "blank-line" if kind == "text" else "auto"}
    summary, want = run("plain", write(tmp_path / "plain.txt", data), **options)
    assert len(want) >= 2 and "unpack" not in summary["stages"]
    for name in PACKERS if kind != "text" else ("gz", "bz2"):
        packed = write(tmp_path / f"packed {name}", PACKERS[name](data))
        summary, found = run(f"out {name}", packed, **options)
        in_ranges = kind == "wiki" and name == "bz2 of streams"
        assert ("unpack" in summary["stages"]) != in_ranges
        assert found == want or in_ranges, name


def test_small_file_that_packs_well_is_unpacked(tmp_path):
    """20 KB that hold a megabyte are too much for one worker's memory."""
    lines = "".join(f"Entry {i % 50} of the log says that all is well, as the one before.\n" for i in range(20_000))
    for name in ("gz", "zst", "bz2"):
        path = write(tmp_path / name, PACK[name](lines.encode()))
        assert path.stat().st_size < tasks.RANGE_BYTES // 4 * 3 // 2
        ((file,),) = tasks.list_ranges([Corpus("i", (str(path),))], ReadOptions(), Problems("stop"))
        assert file.unpack_first, name


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("name", ["gz", "bz2"])
def test_damage_in_a_large_file(name, policy, topics, run, tmp_path):
    data = make("wiki", topics[:60])
    packed = bytearray(PACKERS[name](data))
    packed[len(packed) * 2 // 3] ^= 0x55
    path = write(tmp_path / "damaged", packed)
    if policy == "stop":
        with pytest.raises(Unfinished, match=r"damaged: (damaged|truncated|byte)"):
            run("out", path)
        path.write_bytes(PACKERS[name](data))
        assert run("out", path)[0]["read"]["documents"] == 60
    else:
        write(path, packed + bytes(10))
        summary, _ = run("out", path, write(tmp_path / "good", data), on_error="skip", dedup=())
        lost = summary["lost"]["damaged or truncated file"]
        assert summary["problems"]["damaged or truncated file"] == 1 and lost["files"] == [str(path)]
        assert 0 < lost["bytes"] <= len(packed) + 10 + tasks.RANGE_BYTES
        assert 60 <= summary["read"]["documents"] < 120


def test_nothing_is_left_of_a_file_that_changes(topics, run, tmp_path, monkeypatch):
    """Such as a single one that is still being copied, under --on-error skip."""
    path = write(tmp_path / "a.gz", PACK["gz"](make("wiki", topics)))
    monkeypatch.setattr(documents, "_change", lambda part: f"{part.path}: changed")
    with pytest.raises(BadInput, match=r"no text is left .*: damaged or truncated file 1 \(.*a\.gz\)"):
        run("out", path, on_error="skip")


def test_corrected_option_reuses_unpacked_text(topics, run, tmp_path, monkeypatch):
    """The size of a vocabulary is found too large after unpacking. The corrected command doesn't read the packed files."""
    for i in (0, 1):
        write(tmp_path / f"{i}.gz", PACK["gz"](make("wiki", topics[i::2])))
    packed, options = tmp_path / "?.gz", {"train": True, "model_type": "bpe", "sample_megabytes": 1}
    run("fresh", packed, vocab_size=600, seed=3, **options)
    with pytest.raises(BadInput, match="--vocab-size: 100000 is too large for this corpus"):
        run("out", packed, vocab_size=100_000, **options)
    assert {path.name.split("-")[0] for path in (tmp_path / "out" / ".work").iterdir()} == {"stream", "journal"}
    for path in tmp_path.glob("?.gz"):
        status, damaged = path.stat(), bytearray(path.read_bytes())
        damaged[-8] ^= 1  # the checksum: whatever unpacks all of it fails
        path.write_bytes(damaged)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with monkeypatch.context() as other, pytest.raises(Unfinished, match="damaged gz data"):
        shutil.copytree(tmp_path / "out", tmp_path / "other code")
        other.setattr(output_folder, "code", lambda: {"source": "another"})
        run("other code", packed, vocab_size=600, seed=3, **options)
    run("out", packed, vocab_size=600, seed=3, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_changed_file_beside_text_deleted_after_reading(topics, run, tmp_path, monkeypatch):
    """A build that ran out of disk at its end, and resumes without --on-error skip, then with another file corrected."""
    monkeypatch.setattr(journal, "SWEEP_BYTES", 1)
    folder = tmp_path / "in"
    write(folder / "a.jsonl.gz", PACK["gz"](make("jsonl", topics)))
    last = write(folder / "b.jsonl", make("jsonl", topics[:2]) + b'{"text": 5}')
    with monkeypatch.context() as patched:
        patched.setattr(building, "_commit", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError):
            run("out", folder, on_error="skip")
    assert not list((tmp_path / "out/.work").glob(SPOOLS))
    with pytest.raises(Unfinished, match=r"b\.jsonl: .*not a string"):
        run("out", folder)
    write(last, make("jsonl", topics[:3]))
    assert run("out", folder)[1] == run("fresh", folder)[1]


def test_unpacked_text_beside_an_unreadable_file_is_kept(topics, run, tmp_path, monkeypatch):
    """A build that resumes reads their task again. Root may read everything, so the refusal is made."""
    monkeypatch.setattr(journal, "SWEEP_BYTES", 1)
    folder = tmp_path / "in"
    write(folder / "a.txt", b"Short.")
    write(folder / "b.jsonl.gz", PACK["gz"](make("jsonl", topics)))

    def forbid(path, *rest, real=os.open, **more):
        if os.path.basename(path) == "a.txt":
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    def fail(stages, *rest):
        stages.flush()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "open", forbid)
        patched.setattr(building.pipeline.dedup, "run", fail)
        run("out", folder, on_error="skip")
    assert run("out", folder, on_error="skip")[1] == run("fresh", folder)[1]


def test_spools_of_another_input_are_removed(job, topics, tmp_path):
    names = []
    for i in (0, 1):
        path = write(tmp_path / f"{i}.gz", PACK["gz"](topics[i].encode()))
        names.append(unpack(job, PackedFile(i, FileRange(str(path), "gz"))))
    (tmp_path / ".stream-000001-0000.zst.1a2b.tmp").touch()  # of a killed worker
    remove_others(tmp_path, SPOOLS, names[1:])
    assert [path.name for path in tmp_path.glob("*stream*")] == list(names[1].files)

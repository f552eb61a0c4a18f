"""Builds, training and evaluation over URLs: an S3 server and a web server on this machine, against the local copy."""

import json
import os

import numpy as np
import pytest

from megabert.data.shards import Dataset
from tests.helpers.job import Job
from tests.helpers.web import serving
from tests.integration.conftest import command, metrics

pytestmark = pytest.mark.slow


def train_losses(run):
    return [line["train/loss"] for line in metrics(run) if "train/loss" in line]


@pytest.mark.dist
def test_two_ranks_train_from_a_url(dataset, tmp_path):
    few = ("schedule.total_steps=6", "eval.interval=3", "checkpoint.interval=3")
    job = Job(dataset, tmp_path / "local", *few)
    assert job.codes() == [0, 0], job.output
    with serving() as web:
        web.files = {f"/{p.relative_to(dataset)}": p.read_bytes() for p in dataset.rglob("*") if p.is_file()}
        cache = str(tmp_path / "cache")
        job = Job(web.url, tmp_path / "remote", *few, MEGABERT_CACHE=cache)
        assert job.codes() == [0, 0], job.output
        shards = [path for path, first, _ in web.asked if path.endswith(".tar") and first == 0]
        assert len(shards) == len(set(shards)) > 1, "a shard was fetched by both ranks"
        evaluate = ("-m", "megabert", "evaluate", "--model", tmp_path / "remote", "--data")
        figures = [json.loads(command(*evaluate, data, MEGABERT_CACHE=cache).stdout) for data in (dataset, web.url)]
    assert train_losses(tmp_path / "remote") == train_losses(tmp_path / "local")
    assert len(train_losses(tmp_path / "local")) == 6 and figures[0] == figures[1]


@pytest.fixture
def s3(monkeypatch):
    """fsspec's file system of a server whose address and keys are in the environment, with a bucket `corpora`."""
    s3fs, moto = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem(use_listings_cache=False)
    system.makedirs("corpora", exist_ok=True)  # what moto holds outlives its server
    yield system
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_build_and_train_from_buckets(s3, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABERT_CACHE", str(tmp_path / "cache"))
    (file,) = corpus.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    parts = {"a.jsonl": b"".join(lines[:30]), "deep/b.jsonl": b"".join(lines[30:])}
    for name, data in parts.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
        s3.pipe(f"corpora/topics/{name}", data)
    options = ("--seq-len", 64, "--vocab-size", 2000, "--workers", 2, "--held-out", 0.05)
    for source, target in (
        ((tmp_path / "in" / "a.jsonl", tmp_path / "in" / "deep"), tmp_path / "local"),
        (("s3://corpora/topics/*.jsonl", "s3://corpora/topics/deep"), tmp_path / "from_bucket"),
    ):
        done = command("-m", "data_prep", "build", "--input", *source, "--output", target, *options)
        assert done.returncode == 0, done.stderr
    s3.put(f"{tmp_path / 'from_bucket'}/", "corpora/data/seq64/", recursive=True)
    local, remote = Dataset(tmp_path / "local"), Dataset("s3://corpora/data/seq64")
    assert [shard.sha256 for shard in remote.manifest.shards] == [shard.sha256 for shard in local.manifest.shards]
    rows = np.arange(local.rows)
    assert np.array_equal(remote.read(rows).ids, local.read(rows).ids)
    losses = []
    for data, run in ((tmp_path / "local", "a"), ("s3://corpora/data/seq64", "b")):
        job = Job(data, tmp_path / run, "schedule.total_steps=5", "eval.interval=0", ranks=1, **os.environ)
        assert job.codes() == [0], job.output
        losses.append(train_losses(tmp_path / run))
    assert losses[0] == losses[1] and len(losses[0]) == 5


def test_missing_bucket_is_one_line(s3):
    done = command("-m", "data_prep", "build", "--input", "s3://nowhere/x", "--output", "/nowhere/x", "--workers", 1)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("--input s3://nowhere/x: no such file or folder")

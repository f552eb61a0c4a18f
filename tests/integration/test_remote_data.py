"""Training and evaluation on a dataset at a URL: the figures of the local copy, bit for bit."""

import json

import pytest

from tests.helpers.job import Job
from tests.helpers.web import serving
from tests.integration.conftest import command, metrics

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def losses(run):
    return [line["train/loss"] for line in metrics(run) if "train/loss" in line]


def test_two_ranks_train_from_a_url_as_from_a_folder(dataset, tmp_path):
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
        found = [
            json.loads(
                command(
                    "-m",
                    "megabert.commands.evaluate",
                    "--model",
                    tmp_path / "remote",
                    "--data",
                    place,
                    MEGABERT_CACHE=cache,
                ).stdout
            )
            for place in (dataset, web.url)
        ]
    assert losses(tmp_path / "remote") == losses(tmp_path / "local") and len(losses(tmp_path / "local")) == 6
    assert found[0] == found[1]

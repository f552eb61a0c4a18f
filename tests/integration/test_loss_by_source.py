"""Held-out figures by source: each prediction counts for the input that its token came from, and together they are the total."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.common.records import Corpus, source_names
from megabert import evaluation
from megabert.data.masking import IGNORE
from megabert.data.shards import Dataset, verify
from megabert.data.tokenizer import Tokenizer
from tests.helpers import once, tiny
from tests.integration.conftest import metrics, output_of, train

WORDS = {
    "words": "river stone window garden winter summer letter paper mountain silver",
    "numbers": "12 345 67 890 2024 31 415 92 653 58",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of two folders, one of words and one of numbers."""

    def make(folder: Path) -> None:
        draw = random.Random(3)
        for name, words in WORDS.items():
            (folder / name).mkdir(parents=True)
            for i in range(60):
                sentences = (" ".join(draw.choices(words.split(), k=8)).capitalize() + "." for _ in range(12))
                (folder / name / f"{i}.txt").write_text("\n".join(sentences))
        options = ("--seq-len", 64, "--vocab-size", 60, "--held-out", 0.3, "--nsp", "--workers", 1, "--quiet")
        inputs = (folder / name for name in WORDS)
        output_of("prep", "build", "--input", *inputs, "--output", folder / "data", *options)

    return once.folder(tmp_path_factory, "two-sources", make) / "data"


@pytest.mark.parametrize("causal", [False, True])
def test_each_prediction_counts_for_its_source(data: Path, causal: bool) -> None:
    held_out = evaluation.held_out(str(data))
    assert held_out.source_names == ["words", "numbers"] and list(verify(data)) == []
    tokenizer = Tokenizer.load(held_out.tokenizer_path)
    more = {"data__masking__strategy": "causal", "model__nsp": False} if causal else {}
    cfg = tiny.config(model__vocab_size=tokenizer.vocab_size, model__max_positions=64, batch__micro_size=4, **more)
    plain = list(evaluation.fixed_batches(held_out, tokenizer, cfg))
    batches = list(evaluation.with_sources(plain, held_out))
    digits = np.array([any(c.isdigit() for c in token) for token in tokenizer.tokens])
    letters = np.array([any(c.isalpha() for c in token) for token in tokenizer.tokens]) & ~digits
    letters[list(tokenizer.special_ids.values())] = False
    for batch in batches:
        labels, sources = batch.mlm_labels.numpy(), batch.sources.numpy()
        assert (sources.sum(0) == (labels != IGNORE)).all()
        shown = np.where(labels == IGNORE, tokenizer.mask_id, labels)
        assert sources[0][letters[shown]].all() and sources[1][digits[shown]].all()
    model = tiny.model(cfg)
    sums = evaluation.batch_sums(model, batches, torch.device("cpu"), 2)
    assert sums[:6].equal(evaluation.batch_sums(model, plain, torch.device("cpu")))
    found = evaluation.summary(sums, held_out.source_names)
    counts = {name: found[f"eval/predictions_by_source/{name}"] for name in held_out.source_names}
    assert min(counts.values()) > 100 and sum(counts.values()) == found["eval/predictions"]
    for figure, whole in (("loss", "mlm_loss"), ("accuracy", "mlm_accuracy")):
        mean = sum(found[f"eval/{figure}_by_source/{name}"] * count for name, count in counts.items())
        assert mean / found["eval/predictions"] == pytest.approx(found[f"eval/{whole}"], abs=1e-6)


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_report_what_one_evaluates(data: Path, tmp_path: Path) -> None:
    run, one_step = tmp_path / "run", ("schedule.total_steps=1", "schedule.warmup_steps=0")
    train(data, run, *one_step, "batch.micro_size=2", "precision=fp32", "zero.stage=3", ranks=2)
    last = [line for line in metrics(run) if "eval/mlm_loss" in line][-1]
    alone = json.loads(output_of("evaluate", "--model", run, "--data", data, "--rows", 64))
    by_source = {name: value for name, value in alone.items() if "_by_source/" in name}
    assert len(by_source) == 6 and {name: last[name] for name in by_source} == pytest.approx(by_source, rel=1e-6)
    output_of("report", run)
    assert "Loss, held out, numbers" in (run / "report.html").read_text()


def test_a_damaged_file_of_sources_is_refused(data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    path = folder / "held_out" / "sources.npy"
    content = path.read_bytes()
    for written, message in ((content[:-1] + bytes([content[-1] ^ 1]), "SHA-256 is not the one"), (None, "is missing")):
        path.unlink() if written is None else path.write_bytes(written)
        with pytest.raises(ValueError, match=rf"sources\.npy: {message}"):
            _ = Dataset(folder / "held_out").sources
        assert [line for line in verify(folder) if "sources.npy" in line] == list(verify(folder)) != []


def test_sources_are_corpora_or_inputs() -> None:
    def of_one(*paths: str) -> tuple[str, ...]:
        return source_names([Corpus("input", paths)])

    assert of_one("/data/web", "wiki/*.txt") == ("web", "wiki") and of_one("a") == of_one(*"ab" * 40) == ()
    assert of_one("web/text", "wiki/text") == ("web_text", "wiki_text") and of_one("x/*.a", "x/*.b") == ("1_x", "2_x")
    assert source_names([Corpus("web", ("a", "b")), Corpus("books", ("c",))]) == ("web", "books")

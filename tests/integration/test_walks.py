"""Commands one after another, as they are typed: from text to Hugging Face and back, a student of a run, rows of 8,192 tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megabert import hf as pretrained
from megabert.data.shards import Dataset
from megabert.model import unpacked_inputs
from tests.helpers import fast_tokenizers, wordpiece
from tests.integration.conftest import SHORT, SMALL, logged, output_of, train

pytestmark = pytest.mark.slow
ONE_LAYER = ("model.layers=1", "model.hidden=32", "data.workers=0")


def read_topics(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (corpus / "topics.jsonl").read_text().splitlines()]


@pytest.mark.dist
def test_model_goes_to_hugging_face_and_back(dataset: Path, corpus: Path, tmp_path: Path) -> None:
    """From two ranks at ZeRO-3 to the weights that transformers reads, and to a run that continues from them."""
    first, folder, back, data = (tmp_path / name for name in ("first", "hf", "back", "data"))
    short = (*SHORT, "batch.global_size=16", "precision=fp32")
    train(dataset, first, *short, "model.max_positions=64", "zero.stage=3", ranks=2)
    assert "BertForPreTraining of step 4, 2,000 tokens" in output_of("export", "--model", first, "--output", folder)
    shown = output_of("convert", "--model", folder, "--run", back)
    assert f"--tokenizer {back / 'tokenizer.model'}" in shown and f"--config {back / 'config.toml'}" in shown
    ours, theirs = (pretrained.load(run).weights for run in (first, back))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    options = ("--tokenizer", back / "tokenizer.model", "--seq-len", 64, "--held-out", 0.05, "--nsp", "--workers", 1)
    output_of("prep", "build", "--input", corpus, "--output", data, *options)
    again = ("train", "--data", data, "--config", back / "config.toml", *SMALL[3:], *short, "--run")
    assert f"starting from the weights of {back} at step 0" in output_of(*again, tmp_path / "second")
    refused = output_of(*again, back, code=2)
    assert refused.count("\n") == 1 and "converted from hf" in refused
    assert output_of("fill", "--model", tmp_path / "second", "the value of the [MASK] is").count("%") == 5


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt"])
def test_tokenizer_file_goes_through_every_command(name: str, corpus: Path, tmp_path: Path) -> None:
    """A byte-level BPE, or a vocabulary whose special ids are not 0 to 4, under every choice of what is masked."""
    file, data, output = (tmp_path / part for part in (name, "data", "hf"))
    if name == "vocab.txt":
        wordpiece.write(file)
    else:
        fast_tokenizers.write(file, texts=read_topics(corpus)[:20], size=1000)
    options = ("--seq-len", 64, "--held-out", 0.02, "--nsp", "--workers", 1, "--tokenizer", file)
    output_of("prep", "build", "--input", corpus, "--output", data, *options)
    for strategy in ("span", "word", "token") if name == "vocab.txt" else ("token",):
        run = tmp_path / f"run-{strategy}"
        train(data, run, *ONE_LAYER, *SHORT, "schedule.total_steps=2", f"data.masking.strategy={strategy}")
        assert len(logged(run)) == 2 and all(0 < loss < 10 for loss in logged(run).values())
        scored = json.loads(output_of("evaluate", "--model", run, "--data", data, "--rows", 64))
        assert scored["step"] == 2 and scored["eval/predictions"] > 64
    output_of("export", "--model", run, "--output", output)
    text = f"The [MASK] of a {'[MASK]' if name == 'vocab.txt' else '<mask>'}."
    assert len(output_of("fill", "--model", output, "--top", 1, text).strip().splitlines()) == 2
    for folder in (data, run):
        assert (folder / name).read_bytes() == file.read_bytes()
    assert json.loads((output / "config.json").read_text())["pad_token_id"] == (name == "tokenizer.json")


def test_distilled_run_resumes_with_its_own_teacher(dataset: Path, tmp_path: Path) -> None:
    teacher, whole, parts = (tmp_path / name for name in ("teacher", "whole", "parts"))
    small = ("model.layers=3", "batch.micro_size=16", "schedule.total_steps=10", "schedule.warmup_steps=2")
    small += ("data.workers=0", "precision=fp32")
    train(dataset, teacher, *small)
    distill = ("distill", "--model", teacher, "--layers", 2, "--data", dataset, "--run")
    assert "deepspeed " in output_of(*distill, whole)
    train(dataset, parts, *small, "model.layers=2", f"distill.teacher={teacher}", "--stop-after", 4)
    assert "resuming from" in output_of(*distill, parts)
    for key in ("train/loss", "train/mlm_loss", "train/nsp_loss", "train/soft_loss", "train/cosine_loss"):
        assert len(logged(whole, key)) == 10 and logged(whole, key) == logged(parts, key)
    begun, taught = logged(whole, "eval/mlm_loss")[0], logged(teacher, "eval/mlm_loss")[10]
    assert begun < taught + 0.5, "it begins as its teacher"
    train(dataset, teacher, *small, "schedule.total_steps=11", "--extend")
    refused = output_of(*distill, whole, "schedule.total_steps=12", code=2)
    assert "distill.teacher's weights (SHA-256)" in refused


def test_rows_of_8192_tokens_as_commands(corpus: Path, tmp_path: Path) -> None:
    """Built, trained, evaluated, exported; transformers' logits of a whole row are ours."""
    transformers = pytest.importorskip("transformers")
    length, data, run, folder = 8192, tmp_path / "data", tmp_path / "run", tmp_path / "hf"
    books = sorted((wordpiece.DATA / "novels").glob("*.txt"))[:3]
    topics = read_topics(corpus)
    for number in range(0 if books else 6):
        books.append(tmp_path / f"{number}.txt")
        books[-1].write_text("\n".join(topics[number::6]))
    options = ("--seq-len", length, "--vocab-size", 2000, "--held-out", 0.4, "--text-documents", "file", "--workers", 1)
    output_of("prep", "build", "--input", *books, "--output", data, *options, timeout=900)
    output_of("prep", "verify", data)
    modern = ("model.kind=modern", "model.norm=pre", "model.nsp=false", "model.layers=4", "model.bias=false")
    modern += (f"model.max_positions={length}", "model.window=128", "model.rope_theta=160000.0", "precision=fp32")
    modern += ("model.dropout=0.0", "model.attention_dropout=0.0", "batch.global_size=2", "batch.micro_size=1")
    train(data, run, *SHORT, *modern, "eval.rows=2", timeout=900)
    losses = list(logged(run).values())
    assert len(losses) == 4 and losses[-1] < losses[0]
    scored = output_of("evaluate", "--model", run, "--data", data, "--rows", 2, timeout=900)
    rows = Dataset(data)
    assert rows.held_out_path is not None
    held_out = np.count_nonzero(Dataset(rows.held_out_path).read(np.arange(2)).ids)
    assert json.loads(scored)["eval/predictions"] == pytest.approx(0.15 * held_out, rel=0.02)
    output_of("export", "--model", run, "--output", folder)

    # the fullest row, as one sequence
    row = max(rows.read(np.arange(len(rows))).ids, key=np.count_nonzero)
    ids = torch.from_numpy(row[row != 0].astype(np.int64))[None]
    assert ids.shape[1] > 0.99 * length
    peer = transformers.ModernBertForMaskedLM.from_pretrained(folder).eval()
    ours = pretrained.load(run).model(torch.device("cpu"))
    with torch.no_grad():
        logits = ours.mlm_logits(ours.encode(**unpacked_inputs(ids))[0])
        wanted = peer(input_ids=ids).logits[0]
    assert (logits - wanted).abs().max() < 1e-4 and wanted.std() > 0.01

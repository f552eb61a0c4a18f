"""Peers that benchmarks compare with: equal work on both sides, and ratios of that alone."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from benchmarks import bench_data, bench_finetune, bench_long, bench_prep
from benchmarks.peers import hf_finetune as trainer
from benchmarks.peers import hf_plain_loop as loop
from benchmarks.peers.hf_step import padded
from benchmarks.race.dataset import Scorer
from megabert import evaluation
from megabert.commands.export import export
from megabert.config import Config, EvalConfig, ModelConfig
from megabert.data.batch import Update
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.finetune import files, tasks
from megabert.finetune.encoding import TaskEncoding, collect_labels
from megabert.hf.mapping import from_huggingface
from tests.conftest import ROOT
from tests.helpers import finetune_problem, wordpiece
from tests.integration.conftest import command

SIZE = ModelConfig(layers=2, hidden=32, heads=2, vocab_size=50, max_positions=16, dropout=0.0, attention_dropout=0.0)
GOLDEN = ROOT / "tests/data/golden/dataset"


def modern(**changes: Any) -> ModelConfig:
    """ModernBERT of three layers, the second and third local."""
    fields = {"kind": "modern", "norm": "pre", "nsp": False, "bias": False, "layer_norm_eps": 1e-5, "window": 64}
    return SIZE.model_copy(update=fields | {"layers": 3} | changes)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


def test_modern_peer_is_modernbert_as_published() -> None:
    """Its loss on sequences of 128 is that of the class with the fields of the published configuration at this size."""
    model = randomised(loop.model_of(modern(max_positions=128), dropout=0.0))
    fields = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    theta = {"global_rope_theta": 10_000.0, "local_rope_theta": 10_000.0, "local_attention": 64, "pad_token_id": 0}
    config = ModernBertConfig(**fields, **theta, intermediate_size=modern().ffn, attn_implementation="eager")
    plain = ModernBertForMaskedLM(config).eval()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(6)
    ids = torch.randint(5, 50, (4, 128))
    real = torch.arange(128) < torch.tensor([128, 100, 70, 128])[:, None]
    labels = ids.where((torch.rand(4, 128) < 0.3) & real, -100)
    batch = {"input_ids": ids.where(real, 0), "attention_mask": real.long(), "labels": labels}
    with torch.no_grad():
        found, expected = model(**batch), plain(**batch)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert found.logits.shape == (int((labels >= 0).sum()), 50), "logits of masked positions alone"


@pytest.mark.parametrize("window", [0, 16])
def test_scorer_gives_modernberts_own_loss(window: int) -> None:
    data = Dataset(GOLDEN)
    tokenizer = Tokenizer.load(data.tokenizer_path)
    size = modern(vocab_size=tokenizer.vocab_size, window=window, max_positions=64)
    model = randomised(loop.model_of(size, dropout=0.0))
    tree = Config(model=size).model_dump()
    found = Scorer(GOLDEN, rows=48, threads=1).score(from_huggingface(model.state_dict(), size), tree)
    cfg = Config(model=size, eval=EvalConfig(rows=48))
    loss = correct = count = 0.0
    for made in evaluation.fixed_batches(data, tokenizer, cfg):
        for batch in padded(Update(0, 0, [made]), 64):
            labels = batch["labels"][batch["labels"] >= 0]
            with torch.no_grad():
                theirs = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")})
            loss, count = loss + theirs.loss.item() * len(labels), count + len(labels)
            correct += (theirs.logits.argmax(-1) == labels).sum().item()
    assert count > 300
    assert found["loss"] == pytest.approx(loss / count, abs=1e-4) and found["loss"] > 5
    assert found["accuracy"] == pytest.approx(correct / count, abs=1e-4)


def test_padded_batches_are_pinned_where_ours_are(monkeypatch: pytest.MonkeyPatch) -> None:
    data, pinned = Dataset(GOLDEN), list[torch.Tensor]()
    cfg = Config(model=modern(vocab_size=2000, max_positions=64), eval=EvalConfig(rows=8))
    made = next(iter(evaluation.fixed_batches(data, Tokenizer.load(data.tokenizer_path), cfg)))
    padded(Update(0, 0, [made]), 64)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    (batch,) = padded(Update(0, 0, [made]), 64)
    assert {id(tensor) for tensor in batch.values()} == set(map(id, pinned)) and len(pinned) == 5


def test_budget_is_tokens_where_they_are_given() -> None:
    minutes, tokens = loop.PeerRecipe(minutes=2, batch=1), loop.PeerRecipe(minutes=0, batch=1, tokens=1000)
    assert loop.budget_used(minutes, 60.0, 10**9) == 0.5 and loop.budget_used(minutes, 999.0, 0) == 1.0
    assert loop.budget_used(tokens, 10**9, 250) == 0.25 and loop.budget_used(tokens, 0.0, 2000) == 1.0
    assert [loop.rate(minutes, used) for used in (0.0, 0.03, 0.06, 1.0)] == pytest.approx([0.0, 2.5e-4, 5e-4, 0.0])
    assert loop.rate(loop.PeerRecipe(minutes=1, batch=1, warmup=0.0), 0.0) == 5e-4


def test_peer_sees_every_sequence_once_and_whole() -> None:
    data = Dataset(GOLDEN)
    sequences = loop.Sequences(data)
    assert len(sequences) == data.manifest.statistics["sequences"]
    assert sequences.lengths.sum() == data.manifest.statistics["tokens"]
    for row in map(sequences.__getitem__, range(0, len(sequences), 37)):
        ids, special = row["input_ids"], row["special_tokens_mask"]
        assert ids[0] == 2 and ids[-1] == 3 and 0 not in ids and ids.count(3) in (1, 2)
        assert special == [int(i in (0, 2, 3, 4)) for i in ids]


def test_equal_sizes_and_the_least_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_data, "ROUNDS", 1)
    monkeypatch.setattr(bench_data, "SECONDS", 0.01)
    dataset, vocabulary = bench_data.synthetic(tmp_path, rows=1024, seq_len=32)
    found = bench_data.measure(dataset, vocabulary, 512, [32, 256], tmp_path)
    against = [c for c in found["comparisons"] if c["peer"].startswith(bench_data.COLLATOR)]
    assert len(against) == 2
    for comparison in against:
        ours, peer = (re.search(r"of (\d+) rows", comparison[side])[1] for side in ("ours", "peer"))
        assert ours == peer
        rates = [found["rows_per_sec"][comparison[side]]["p50"] for side in ("ours", "peer")]
        assert comparison["ratio"] == rates[0] / rates[1] > 0
    assert found["ratio"] == min(c["ratio"] for c in against)
    with pytest.raises(ValueError, match="fewer than a batch of 2048"):
        bench_data.hugging_face(dataset, 512, 2048)


def test_rows_that_fit_on_one_side_only_have_no_ratio() -> None:
    fits: dict[str, Any] = {"seconds": {"p50": 2.0}, "memory_peak_gib": 1.0, "loss": 1.0, "gradient_norm": 1.0}
    nothing: dict[str, Any] = {"seconds": None}
    peer_alone = dict.fromkeys(bench_long.SIDES, nothing) | {"hf sdpa": fits}
    for by_side, ratios in ((peer_alone, []), (peer_alone | {bench_long.OURS: fits}, [1.0, 1.0])):
        bench_long.check_equal("fp32", by_side)
        assert [one["ratio"] for one in bench_long.compare("", by_side)] == ratios


@pytest.mark.parametrize("peer", bench_prep.PEERS)
def test_the_peers_instances_are_the_texts_ids_in_order(peer: str, tmp_path: Path) -> None:
    pytest.importorskip(bench_prep.PEERS[peer])
    vocabulary = wordpiece.write(tmp_path / "vocab.txt")
    words = [word for word in wordpiece.WORDS if not word.startswith("##")]
    texts = [" ".join(words[i % len(words)] for i in range(n, n + 50)) for n in range(40)]
    (tmp_path / "a").write_text('<doc id="1" url="u" title="t">\n' + "\n\n".join(texts[:20]) + "\n</doc>\n")
    (tmp_path / "b").write_text("\n".join(texts[20:]))
    files = [str(tmp_path / name) for name in "ab"]
    found = bench_prep.hugging_face(files, str(vocabulary), tmp_path / "out.npy", 1_000_000, peer)
    tokenizer = Tokenizer.load(vocabulary)
    ids = list(chain.from_iterable([7, *one, 8] for one in tokenizer.encode_batch(texts)))
    assert (tokenizer.special_ids["cls"], tokenizer.special_ids["sep"]) == (7, 8)
    rows = np.load(tmp_path / "out.npy")
    assert rows.shape == (len(ids) // 128, 128) and found["instances"] == len(rows) > 5
    assert rows.ravel().tolist() == ids[: rows.size]
    assert found["mb_per_second"] == 1 / found["seconds"] < found["encode_mb_per_second"]


@pytest.mark.slow
def test_without_a_vocabulary_no_ratio_is_made(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A sentence of a few words stands here. Another one follows it.\n\n" * 400)
    options = ("--workers", 1, "--repeats", 1, "--vocab", tmp_path / "none.txt")
    options += ("--tokenizer", wordpiece.write(tmp_path / "vocab.txt"))
    done = command("benchmarks/bench_prep.py", "--input", tmp_path / "text", *options)
    assert done.returncode == 0 and "ratio not measured" in done.stdout, done.stderr


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model's run and its export, and with files of tags and of pairs of texts."""
    folder = tmp_path_factory.mktemp("tuned")
    export(finetune_problem.write_run(folder / "run", model__layers=1), folder / "hf")
    for name, seed in (("train", 1), ("test", 2)):
        finetune_problem.write_tags(folder / f"{name}.conll", 24, seed)
        finetune_problem.write_texts(folder / f"{name}.tsv", 24, seed)
    (folder / "pairs.tsv").write_text("a\tb\tlabel\nw1 w2 w3 w4\tw5 w6\tx\nw1\tw2 w3 w4 w5 w6 w7 w8\ty\n")
    return folder


@pytest.mark.parametrize(("kind", "file"), [("tag", "train.conll"), ("classify", "pairs.tsv")])
def test_trainer_has_the_inputs_of_ours(kind: str, file: str, tuned: Path) -> None:
    task = tasks.custom(kind) if kind == "tag" else tasks.custom(kind, ("a", "b"), "label")
    examples = files.read(task, tuned / file)
    labels = collect_labels(task, examples)
    tokenizer = trainer.transformers.AutoTokenizer.from_pretrained(tuned / "hf")
    rows, _ = trainer.rows_of(task, examples, tokenizer, {label: i for i, label in enumerate(labels)}, 8)
    items = TaskEncoding(task, Tokenizer.load(tuned / "run/vocab.txt"), labels, 8).encode(examples)
    first = {item.example: item for item in reversed(items)}
    for i, row in enumerate(rows):
        assert row["input_ids"] == first[i].ids.tolist() and len(row["input_ids"]) <= 8
        assert row["token_type_ids"] == [int(n >= first[i].second) for n in range(len(row["input_ids"]))]
        if kind == "classify":
            assert row["label"] == first[i].targets[0]
        else:
            tags = [-100, *(labels.index(tag) for tag in examples[i].tags[:6]), -100]
            assert row["labels"] == tags
    assert max(len(item.ids) for item in items) == 8, "some are truncated"


def test_trainer_learns_and_leaves_what_ours_leaves(tuned: Path) -> None:
    options = (
        f"--model {tuned}/hf --train {tuned}/train.conll --dev {tuned}/test.conll --test {tuned}/test.conll "
        "--kind tag --metric f1 --lr 1e-2 --batch 8 --epochs 6 --max-length 8 --precision fp32 --seeds 1 "
        f"--output {tuned}/out"
    ).split()
    trainer.main(options)
    result = json.loads((tuned / "out/seed1/result.json").read_text())
    found = tuned / "out/seed1/predictions-test.conll"
    f1 = bench_finetune.ratio(bench_finetune.entity_tallies(found, found))
    assert f1 == pytest.approx(result["scores"]["test"]["f1"]) and f1 > 0.5
    sentences = [block.split("\n") for block in found.read_text().strip().split("\n\n")]
    assert all(line.endswith(" O") for block in sentences for line in block[6:]), "words behind the last token"
    assert {entry.name for entry in (tuned / "out/seed1").iterdir()} == {"result.json", found.name}
    for option, value in (("--dropout", "0"), ("--precision", "bf16")):
        with pytest.raises(ValueError, match=r"the peer is for .* not (dropout|tag)"):
            trainer.main([*options, option, value])


def test_word_without_a_token_is_outside_entities() -> None:
    assert trainer.first_tokens([None, 0, 0, 2, None]) == {0: 1, 2: 3}
    task, labels = tasks.custom("tag"), ("B-a", "O")
    example = files.SentenceExample("0", "f", ("one", "\ufe0f", "two"), None)
    logits = np.array([[[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]]], np.float32)
    assert trainer.decode(task, [example], [{0: 1, 2: 3}], logits, labels) == [["B-a", "O", "B-a"]]

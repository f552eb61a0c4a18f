"""NaN and infinities: in weights every reader refuses them by name, in losses and scores they are never the best."""

import math
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabert import checkpoint, hf
from megabert.checkpoint import Checkpoints
from megabert.commands import average, convert, evaluate, export, features, fill, pairs
from megabert.config import CheckpointConfig
from megabert.data.pairs import Pair
from megabert.data.shards import Dataset
from megabert.engine.zero_layout import WEIGHT
from megabert.finetune.__main__ import main as finetune
from megabert.finetune.run import best_run, summarise
from megabert.finetune.tasks import custom
from megabert.objectives.minimal_pairs import build_table
from tests.checkpoint.test_store import state
from tests.commands.test_convert import make, one_line, rewrite
from tests.finetune.test_run import result
from tests.helpers import finetune_problem, finetuned, runs, tiny
from tests.test_held_out_by_dataset import DATA
from tests.test_patience import LOSSES, opened, trained

NAN, INF = float("nan"), float("inf")
QUERY, OURS = "bert.encoder.layer.1.attention.self.query.weight", "layers.1.feed_forward.bias"
SAYS = " has NaN or infinite values: its training diverged, or the file is damaged; name another model or an earlier"
TEXT = "the fox"


def with_value(weights: dict[str, torch.Tensor], name: str, value: float) -> dict[str, torch.Tensor]:
    """Copies of `weights` with `value` as the last element of one."""
    changed = {key: weight.clone() for key, weight in weights.items()}
    changed[name].view(-1)[-1] = value
    return changed


def run_with(folder: Path, name: str = OURS, value: float = NAN, change: Any = None) -> Path:
    """A run with such a weight."""
    found = hf.load(runs.make(folder, "uncased"))
    weights = change(found.weights) if change else with_value(found.weights, name, value)
    shutil.rmtree(folder / "checkpoints")
    checkpoint.write_start(folder, weights, {k: v for k, v in found.state.items() if k != "step"})
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "pairs.txt").write_text(f"{TEXT}\nfox the\n")
    (folder / "lines.txt").write_text(f"{TEXT}\n")
    (folder / "labels.tsv").write_text("label\ttext\na\tfox\nb\tthe\n")
    return folder


READERS: dict[str, Callable[[Path, Path, Path], int]] = {
    "convert": lambda model, texts, out: convert.main(["--model", str(model), "--run", str(out)]),
    "export": lambda model, texts, out: export.main(["--model", str(model), "--output", str(out)]),
    "features": lambda model, texts, out: features.main(
        ["--model", str(model), "--input", str(texts / "lines.txt"), "--output", f"{out}.npy"]
    ),
    "fill": lambda model, texts, out: fill.main(["--model", str(model), "the [MASK]"]),
    "pairs": lambda model, texts, out: pairs.main(["--model", str(model), "--pairs", str(texts / "pairs.txt")]),
    "evaluate": lambda model, texts, out: evaluate.main(["--model", str(model), "--data", str(DATA)]),
    "finetune": lambda model, texts, out: finetune(
        ["--model", str(model), "--output", str(out), "--kind", "classify", "--text", "text", "--label", "label"]
        + [f"--{name}={texts / 'labels.tsv'}" for name in ("train", "dev")]
    ),
}


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("reader", READERS)
def test_hugging_face_folder_is_refused(reader: str, texts: Path, tmp_path: Path, capsys) -> None:
    make(tmp_path / "hf")
    rewrite(tmp_path / "hf", lambda state: with_value(state, QUERY, NAN))
    capsys.readouterr()
    assert READERS[reader](tmp_path / "hf", texts, tmp_path / "out") == 2
    assert f"hf/model.safetensors: {QUERY}{SAYS}" in one_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_any_non_finite_value_of_any_type_is_found(value: float, tmp_path: Path) -> None:
    peer = make(tmp_path / "hf", binary=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weights = {name: weight.to(dtype) for name, weight in peer.state_dict().items()}
        file = tmp_path / "hf" / "pytorch_model.bin"
        torch.save(weights, file)
        assert hf.load(tmp_path / "hf").initialised == ()
        torch.save(with_value(weights, QUERY, value), file)
        with pytest.raises(ValueError, match=f"pytorch_model.bin: {QUERY}{SAYS}"):
            hf.load(tmp_path / "hf")
    torch.save(with_value(peer.state_dict(), QUERY, torch.finfo(torch.float32).max), file)
    hf.load(tmp_path / "hf")


@pytest.mark.parametrize("reader", ["export", "pairs"])
def test_run_is_refused(reader: str, texts: Path, tmp_path: Path, capsys) -> None:
    run = run_with(tmp_path / "run")
    assert READERS[reader](run, texts, tmp_path / "out") == 2
    assert f"step-00000000: {OURS}{SAYS}" in one_line(capsys)


def test_fine_tuned_model_is_refused(tmp_path: Path, capsys) -> None:
    task = custom("classify", text=["text"], label="label")
    best = finetuned.make(tmp_path, task, finetune_problem.write_texts(tmp_path / "texts.tsv", 20, 1))
    file = best / "model.safetensors"
    save_file(with_value(load_file(file), "head.output.weight", INF), file)
    predict = ["--model", str(best), "--predict", str(tmp_path / "texts.tsv"), "--output", str(tmp_path / "p.tsv")]
    for command in (finetune, predict), (export.main, ["--model", str(best), "--output", str(tmp_path / "hf")]):
        assert command[0](command[1]) == 2
        assert f"model.safetensors: head.output.weight{SAYS}" in one_line(capsys)


def test_resume_init_from_and_average_are_refused(world: Any, tmp_path: Path, capsys) -> None:
    cfg = tiny.config()
    for kind in (WEIGHT, "exp_avg_sq"):
        engine = tiny.engine(cfg, world)
        tiny.train(engine, range(1))
        saved = Checkpoints(tmp_path / kind, world, CheckpointConfig(asynchronous=False))
        parts = engine.layout.weights() if kind == WEIGHT else engine.layout.moments(engine.optimizer)
        saved.save(engine, state(1, cfg))
        part = next(part for part in parts if part.name == "layers.1.qkv.bias")
        part.values[kind][0] = NAN
        saved.save(engine, state(2, cfg))
        fresh = tiny.engine(cfg, world)
        with pytest.raises(ValueError, match=f"step-00000002: layers.1.qkv.bias{SAYS}"):
            saved.load(fresh, saved.latest())
        with pytest.raises(ValueError, match=f"step-00000002: layers.1.qkv.bias{SAYS}"):
            checkpoint.start_engine(fresh, tmp_path / kind, world, moments=True)
    assert average.main(["--run", str(tmp_path / WEIGHT), "--output", str(tmp_path / "mean")]) == 2
    assert SAYS in one_line(capsys) and not (tmp_path / "mean").exists()


def test_finite_weights_that_overflow_give_no_figures(texts: Path, tmp_path: Path, capsys) -> None:
    """The decoder's bias is finite, differences of its elements are not."""

    def far_apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bias = torch.full_like(weights["embeddings.word.bias"], 3e38)
        bias[::2] *= -1
        return weights | {"embeddings.word.bias": bias}

    assert READERS["pairs"](run_with(tmp_path / "run", change=far_apart), texts, tmp_path) == 2
    assert "run: its score of 'fox the' is -inf; name another model" in one_line(capsys)
    data = Dataset(DATA)
    found = hf.load(runs.make(tmp_path / "other", "unigram"))
    shutil.copy(data.tokenizer_path, tmp_path / "other" / "tokenizer.model")
    model = found.config.model.model_copy(update={"vocab_size": data.manifest.vocab_size, "max_positions": 64})
    cfg = found.config.model_copy(update={"model": model})
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    places = {"config": cfg.model_dump(), "dataset": "none", "seconds": 0.0}
    places |= {"tokenizer": data.manifest.tokenizer["sha256"]}
    checkpoint.write_start(tmp_path / "other", far_apart(runs.model(model).state_dict()), places)
    assert evaluate.main(["--model", str(tmp_path / "other"), "--data", str(DATA), "--rows", "4"]) == 2
    assert "other is not finite; name another model" in one_line(capsys)


def test_pairs_with_a_score_of_nan_have_no_accuracy() -> None:
    scores = {"good": NAN, "bad": -2.0, "best": -1.0}
    of = [Pair("good", "bad", "a", "f"), Pair("bad", "good", "b", "f"), Pair("best", "bad", "c", "g")]
    table = build_table(of, scores)
    assert math.isnan(table["fields"]["f"]) and table["fields"]["g"] == 1.0 and math.isnan(table["accuracy"])


def test_a_loss_of_nan_is_never_the_best(world: Any, tmp_path: Path) -> None:
    assert trained(world, tmp_path, LOSSES | {0: NAN, 6: NAN}) == 8
    assert hf.load(tmp_path / "best").step == 4


def test_a_held_out_loss_of_nan_is_printed(world: Any, tmp_path: Path, monkeypatch, caplog) -> None:
    trainer = opened(world, tmp_path, {})
    workload: Any = trainer.workload
    del workload.evaluate  # the helper's
    monkeypatch.setattr(workload, "evaluate_on", lambda split, progress: {"eval/mlm_loss": NAN, "eval/pairs": 2e4})
    monkeypatch.setattr(workload, "samples", lambda dataset: [])
    workload.evaluate(7, lambda: None)
    trainer.close()
    assert "step       7  held-out  mlm_loss nan" in caplog.text and "pairs" not in caplog.text


def test_a_score_of_nan_is_never_the_best(tmp_path: Path) -> None:
    """Among learning rates and among the seeds of one, wherever it stands."""
    for scores in permutations((NAN, 0.2, 0.7)):
        rates = [result(1, lr, accuracy, 0.5) for lr, accuracy in zip((1e-5, 2e-5, 3e-5), scores, strict=True)]
        assert summarise(rates, "accuracy")[0]["scores"]["dev"]["accuracy"]["mean"] == 0.7
        seeds = [result(seed, 1e-5, accuracy, 0.5) | {"name": "run", "best_step": 2, "steps": 3}
                 for seed, accuracy in enumerate(scores)]  # fmt: skip
        for one in seeds:
            one["settings"]["epochs"] = 3
        assert best_run(tmp_path, [{"point": {"lr": 1e-5}}], seeds, "accuracy")["dev"] == 0.7

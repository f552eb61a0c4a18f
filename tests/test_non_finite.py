"""NaN and infinities: in weights every reader refuses them by name, in losses and scores they are never the best."""

import math
import shutil
from itertools import permutations

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabert import checkpoint, hf
from megabert.checkpoint import Checkpoints
from megabert.commands import average, convert, evaluate, export, features, fill, pairs
from megabert.config import CheckpointConfig
from megabert.engine.zero_layout import WEIGHT
from megabert.finetune.__main__ import main as finetune
from megabert.finetune.run import best_run, summarise
from megabert.finetune.tasks import custom
from megabert.objectives.minimal_pairs import build_table
from megabert.objectives.pairs import Pair
from tests.checkpoint.test_store import state
from tests.commands.test_convert import make, rewrite
from tests.finetune.test_run import result
from tests.helpers import finetune_problem, finetuned, runs, tiny
from tests.helpers.golden_runs import DATA
from tests.helpers.refusal import one_line, refusal
from tests.test_patience import LOSSES, opened, trained

NAN, INF = float("nan"), float("inf")
QUERY, OURS = "bert.encoder.layer.1.attention.self.query.weight", "layers.1.feed_forward.bias"
SAYS = " has NaN or infinite values: its training diverged, or the file is damaged; name another model or an earlier"
READERS = {
    "convert": (convert.main, "--run out"),
    "export": (export.main, "--output out"),
    "features": (features.main, "--input lines.txt --output out.npy"),
    "fill": (fill.main, "[MASK]"),
    "pairs": (pairs.main, "--pairs pairs.txt"),
    "evaluate": (evaluate.main, f"--data {DATA}"),
    "finetune": (finetune, "--output out --kind classify --text text --label label --train tags.tsv --dev tags.tsv"),
}


@pytest.fixture
def read(tmp_path_factory, monkeypatch):
    """Gives the exit code of a command that reads a model; nothing is written."""
    folder = tmp_path_factory.mktemp("texts")
    made = {"pairs.txt": "the fox\nfox the\n", "lines.txt": "the fox\n", "tags.tsv": "label\ttext\na\tfox\nb\tthe\n"}
    for name, text in made.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    yield lambda reader, model: READERS[reader][0](["--model", str(model), *READERS[reader][1].split()])
    assert {path.name for path in folder.iterdir()} == set(made)


def with_value(weights, name, value):
    """Copies of `weights` with `value` as the last element of one."""
    changed = {key: weight.clone() for key, weight in weights.items()}
    changed[name].view(-1)[-1] = value
    return changed


def rewritten(folder, change, kind="uncased", **fields):
    """A run whose weights are changed so; `fields`: of its model."""
    found = hf.load(runs.make(folder, kind, fields=fields))
    shutil.rmtree(folder / "checkpoints")
    checkpoint.write_start(folder, change(found.weights), {k: v for k, v in found.state.items() if k != "step"})
    return folder


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("reader", READERS)
def test_a_hugging_face_folder_is_refused(reader, read, tmp_path, capsys):
    make(tmp_path / "hf")
    rewrite(tmp_path / "hf", lambda state: with_value(state, QUERY, NAN))
    capsys.readouterr()
    assert read(reader, tmp_path / "hf") == 2
    assert f"hf/model.safetensors: {QUERY}{SAYS}" in one_line(capsys)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_non_finite_values_of_any_type_are_found(value, tmp_path):
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
def test_a_run_is_refused(reader, read, tmp_path, capsys):
    assert read(reader, rewritten(tmp_path / "run", lambda weights: with_value(weights, OURS, NAN))) == 2
    assert f"step-00000000: {OURS}{SAYS}" in one_line(capsys)


def test_a_fine_tuned_model_is_refused(tmp_path, capsys):
    task = custom("classify", text=["text"], label="label")
    best = finetuned.make(tmp_path, task, finetune_problem.write_texts(tmp_path / "texts.tsv", 20, 1))
    file = best / "model.safetensors"
    save_file(with_value(load_file(file), "head.output.weight", INF), file)
    for main, words in (finetune, ["--predict", str(tmp_path / "texts.tsv")]), (export.main, []):
        said = refusal(capsys, main, "--model", best, "--output", tmp_path / "out", *words)
        assert f"model.safetensors: head.output.weight{SAYS}" in said


def test_resume_init_from_and_average_are_refused(world, tmp_path, capsys):
    cfg = tiny.config()
    for kind in (WEIGHT, "exp_avg_sq"):
        engine = tiny.engine(cfg, world)
        tiny.train(engine, range(1))
        saved = Checkpoints(tmp_path / kind, world, CheckpointConfig(asynchronous=False))
        saved.save(engine, state(1, cfg))
        part = next(part for part in engine.layout.slices(engine.optimizer) if part.name == "layers.1.qkv.bias")
        part.values[kind][0] = NAN
        saved.save(engine, state(2, cfg))
        fresh = tiny.engine(cfg, world)
        with pytest.raises(ValueError, match=f"step-00000002: layers.1.qkv.bias{SAYS}"):
            saved.load(fresh, saved.latest())
        with pytest.raises(ValueError, match=f"step-00000002: layers.1.qkv.bias{SAYS}"):
            checkpoint.start_engine(fresh, tmp_path / kind, moments=True)
    assert SAYS in refusal(capsys, average.main, "--run", tmp_path / WEIGHT, "--output", tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_finite_weights_that_overflow_give_no_figures(read, tmp_path, capsys):
    """The decoder's bias is finite, differences of its elements are not."""

    def far_apart(weights):
        bias = torch.full_like(weights["embeddings.word.bias"], 3e38)
        bias[::2] *= -1
        return weights | {"embeddings.word.bias": bias}

    assert read("pairs", rewritten(tmp_path / "run", far_apart)) == 2
    assert "run: its score of 'fox the' is -inf; name another model" in one_line(capsys)
    rewritten(tmp_path / "other", far_apart, str(DATA / "tokenizer.model"), max_positions=64)
    said = refusal(capsys, evaluate.main, "--model", tmp_path / "other", "--data", DATA, "--rows", 4)
    assert "other is not finite; name another model" in said


def test_pairs_scored_nan_have_no_accuracy():
    scores = {"good": NAN, "bad": -2.0, "best": -1.0}
    of = [Pair("good", "bad", "a", "f"), Pair("bad", "good", "b", "f"), Pair("best", "bad", "c", "g")]
    table = build_table(of, scores)
    assert math.isnan(table["fields"]["f"]) and table["fields"]["g"] == 1.0 and math.isnan(table["accuracy"])


def test_a_loss_of_nan_is_never_the_best(world, tmp_path):
    assert trained(world, tmp_path, LOSSES | {0: NAN, 6: NAN}) == 8
    assert hf.load(tmp_path / "best").step == 4


def test_a_held_out_loss_of_nan_is_printed(world, tmp_path, monkeypatch, caplog):
    trainer = opened(world, tmp_path, {})
    workload = trainer.workload
    del workload.evaluate  # the helper's
    monkeypatch.setattr(workload, "evaluate_on", lambda split, progress: {"eval/mlm_loss": NAN, "eval/pairs": 2e4})
    monkeypatch.setattr(workload, "samples", lambda dataset: [])
    workload.evaluate(7, lambda: None)
    trainer.close()
    assert "step       7  held-out  mlm_loss nan" in caplog.text and "pairs" not in caplog.text


def test_a_score_of_nan_is_never_the_best(tmp_path):
    """Among learning rates and among the seeds of one, wherever it stands."""
    for scores in permutations((NAN, 0.2, 0.7)):
        rates = [result(1, lr, accuracy, 0.5) for lr, accuracy in zip((1e-5, 2e-5, 3e-5), scores, strict=True)]
        assert summarise(rates, "accuracy")[0]["scores"]["dev"]["accuracy"]["mean"] == 0.7
        seeds = [result(seed, 1e-5, accuracy, 0.5) for seed, accuracy in enumerate(scores)]
        for one in seeds:
            one |= {"name": "run", "best_step": 2, "steps": 3}
            one["settings"]["epochs"] = 3
        assert best_run(tmp_path, [{"point": {"lr": 1e-5}}], seeds, "accuracy")["dev"] == 0.7

"""Runs: resumed bit for bit, ranks, from scratch; several runs in one folder and their summary."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabert import hf as pretrained
from megabert.commands import convert, export
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import Watchdog
from megabert.finetune import files, prediction, run, save, tasks
from megabert.finetune.run import Data, FineTuning
from megabert.finetune.scores import suffix
from megabert.finetune.settings import Settings
from megabert.hf import Pretrained
from tests.helpers import finetune_problem, finetuned
from tests.helpers.finetune_problem import write_label_sets, write_questions, write_tags, write_texts
from tests.helpers.loop import StopAt
from tests.helpers.ranks import run_ranks

TASKS = {kind: tasks.custom(kind, text=["text"], label="label") for kind in ("classify", "multilabel")}
TASKS |= {"tag": tasks.custom("tag", metrics=["f1", "accuracy"]), "span": tasks.preset("squad1.1")}
LABELS = {"classify": ("even", "odd"), "multilabel": ("even", "high"), "tag": ("B-A", "B-B", "O"), "span": ()}
WRITERS = dict(zip(TASKS, (write_texts, write_label_sets, write_tags, write_questions), strict=True))
SETTINGS = Settings(lr=3e-3, batch=8, epochs=2, max_length=32, stride=8, precision="fp32", zero=0)
MODERN = {"kind": "modern", "norm": "pre", "nsp": False}
STARTS = [("classify", {}), ("tag", {}), ("tag", MODERN), ("classify", {"nsp": False})]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    finetune_problem.write_run(folder / "run")
    for kind, write in WRITERS.items():
        write(folder / f"{kind}.train", 400 if kind == "multilabel" else 60, 1)
        write(folder / f"{kind}.dev", 30, 2)
    return folder


@pytest.fixture
def start(base) -> Pretrained:
    return pretrained.load(base / "run")


def data_of(base: Path, kind: str, start: Pretrained) -> Data:
    task = TASKS[kind]
    examples = {name: files.read(task, base / f"{kind}.{name}") for name in ("train", "dev")}
    return run.encode_splits(task, examples, start.tokenizer, SETTINGS)


def unwatched(world: World) -> Watchdog:
    """A watchdog that was never started."""
    return Watchdog(world, "", 0)


def train(folder: Path, data: Data, start: Pretrained, settings: Settings, world: World, stop: Any = None) -> Any:
    return FineTuning(folder, data, start, settings, world, 2).train(stop or StopAt(), unwatched(world))


def fine_tune(base: Path, kind: str, folder: Path, world: World, settings: Settings, stop: Any = None) -> Any:
    start = pretrained.load(base / "run")
    return train(folder, data_of(base, kind, start), start, settings, world, stop)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "best" / save.WEIGHTS)


def lines(folder: Path, has: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if has in line]


def change(**values: Any) -> Settings:
    return replace(SETTINGS, **values)


@pytest.mark.parametrize("kind", TASKS)
def test_run_leaves_model_scores_and_predictions(kind, base, tmp_path, world, start) -> None:
    # Of these, what is predicted is a function of one word.
    learned = {"tag": change(epochs=4), "multilabel": change(epochs=8, batch=16, dropout=0.0)}
    settings, data = learned.get(kind, SETTINGS), data_of(base, kind, start)
    result = train(tmp_path, data, start, settings, world)
    per_epoch = -(-len(data.items["train"]) // settings.batch)
    assert result["steps"] == settings.epochs * per_epoch == lines(tmp_path, "train/loss")[-1]["step"]
    assert json.loads((tmp_path / "result.json").read_text()) == result
    main = TASKS[kind].metrics[0]
    dev = [line[f"dev/{main}"] for line in lines(tmp_path, f"dev/{main}")]
    assert len(dev) == settings.epochs and not (tmp_path / "checkpoints").exists()
    assert result["scores"]["dev"][main] == max(dev)  # the best weights, as they were saved
    found = save.load(tmp_path, world.device)
    assert found.results["dev"] == result["scores"]["dev"] and found.described.labels == LABELS[kind]
    ending = suffix(TASKS[kind], data.examples["dev"])
    prediction.predict_file(tmp_path, base / f"{kind}.dev", tmp_path / f"again.{ending}")
    again, predicted = ((tmp_path / f"{name}.{ending}").read_text() for name in ("again", "predictions-dev"))
    if kind == "tag":
        predicted = "\n".join(" ".join(line.split()[::2]) for line in predicted.split("\n"))  # without the true tags
    assert again == predicted and len(again) > 100
    if kind in learned:
        assert result["scores"]["dev"][main] > {"tag": 0.8, "multilabel": 0.85}[kind]


@pytest.mark.parametrize(("layers", "width", "modern"), [
    ("last", 1, False), ("last", 1, True), ("1,2,3,4", 4, False), ("1+2+3+4", 1, True),
])  # fmt: skip
def test_added_layer_learns_on_a_constant_encoder(layers: str, width: int, modern: bool, base, tmp_path, world) -> None:
    """Tags are a function of the word, so features of random weights separate them; three in four are O."""
    made = {"model__kind": "modern", "model__norm": "pre", "model__nsp": False} if modern else {}
    source, folder = finetune_problem.write_run(tmp_path / "run", **made), tmp_path / "out"
    start, settings = pretrained.load(source), change(freeze=True, layers=layers, lr=5e-2, epochs=6)
    result = train(folder, data_of(base, "tag", start), start, settings, world)
    assert result["scores"]["dev"]["accuracy"] > 0.9
    before, after = pretrained.load(source).weights, weights(folder)
    encoder = {name for name in after if name.startswith("encoder.")}
    assert len(encoder) > 40
    assert all(torch.equal(after[name], before[name.removeprefix("encoder.")]) for name in encoder)
    head = {name: tuple(tensor.shape) for name, tensor in after.items() if name not in encoder}
    if modern and layers == "last":
        for name in ("weight", "bias", "norm_weight", "norm_bias"):
            assert torch.equal(after[f"head.transform.{name}"], before[f"mlm.{name}"])
            del head[f"head.transform.{name}"]
    assert head == {"head.output.weight": (3, 32 * width), "head.output.bias": (3,)}
    assert save.load(folder, world.device).described.layers == layers
    prediction.predict_file(folder, base / "tag.dev", tmp_path / "again.conll")
    predicted = (folder / "predictions-dev.conll").read_text().split("\n")
    assert (tmp_path / "again.conll").read_text() == "\n".join(" ".join(line.split()[::2]) for line in predicted)


@pytest.mark.parametrize("modern", [False, True])
def test_head_that_is_missing_is_drawn_by_seed(modern: bool, base, tmp_path, world) -> None:
    """A folder of a masked LM has no pooler, one of a modern encoder no transform, also as a run: drawn by the seed, and trained with
    --freeze."""
    made = {"model__kind": "modern", "model__norm": "pre"} if modern else {}
    export.export(finetune_problem.write_run(tmp_path / "run", model__nsp=False, **made), tmp_path / "hf")
    if modern:
        tensors = load_file(tmp_path / "hf/model.safetensors")
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(("head.", "decoder."))}
        assert len(rest) < len(tensors)
        save_file(rest, tmp_path / "hf/model.safetensors", {"format": "pt"})
        convert.convert(tmp_path / "hf", tmp_path / "converted")
    start = pretrained.load(tmp_path / ("converted" if modern else "hf"))
    part = "transform" if modern else "pooler"
    data = data_of(base, "classify", start)
    runs = [FineTuning(tmp_path / "a", data, start, change(seed=seed), world, 5) for seed in (1, 1, 2)]
    first, again, other = (getattr(run_.module.head, part).weight for run_ in runs)
    assert torch.equal(first, again) and not torch.equal(first, other)
    words = [run_.module.encoder.embeddings.word.weight for run_ in runs]
    assert torch.equal(words[0], words[2]) and torch.equal(words[0], start.weights["embeddings.word.weight"])
    frozen = FineTuning(tmp_path / "b", data, start, change(freeze=True), world, 5)
    trained = {name for name, _ in frozen.module.named_parameters()}
    assert {"head.output.weight", f"head.{part}.weight"} <= trained
    assert not any("encoder." in name for name in trained)


def test_threshold_of_dev_is_saved_and_predicts(base, tmp_path, world, start) -> None:
    """Labels 1 in 6; one epoch predicts the rare label of no text at a half."""
    for name in ("train", "dev"):
        _, *rows = (base / f"classify.{name}").read_text().splitlines()
        texts = [("no" if n % 6 else "yes", row.partition("\t")[2]) for n, row in enumerate(rows)]
        (tmp_path / name).write_text("\n".join(map("\t".join, [("label", "text"), *texts])) + "\n")
    task = tasks.custom("classify", text=["text"], label="label", metrics=["f1", "auroc"])
    examples = {name: files.read(task, tmp_path / name) for name in ("train", "dev")}
    found, thresholds = {}, {}
    for threshold in ("half", "f1"):
        settings, folder = change(epochs=1, threshold=threshold), tmp_path / threshold
        data = run.encode_splits(task, examples, start.tokenizer, settings)
        found[threshold] = train(folder, data, start, settings, world)["scores"]["dev"]
        thresholds[threshold] = save.load(folder, world.device).described.threshold
        prediction.predict_file(folder, tmp_path / "dev", tmp_path / "again.tsv")
        assert (tmp_path / "again.tsv").read_text() == (folder / "predictions-dev.tsv").read_text()
    assert found["f1"]["auroc"] == found["half"]["auroc"] > 0 == found["half"]["f1"] < found["f1"]["f1"]
    assert 0 < thresholds["f1"] < thresholds["half"] == 0.5
    head, _, yes = (line.split("\t") for line in (tmp_path / "f1/labels-dev.tsv").read_text().splitlines())
    assert head == ["label", "precision", "recall", "f1", "support"] and yes[3:] == [f"{found['f1']['f1']:.4f}", "5"]


def test_runs_leave_a_summary_and_are_not_repeated(base, tmp_path, world, start) -> None:
    """The best rate first; a finished run is freed before the next one."""
    settings, data, common = change(epochs=1, batch=60), data_of(base, "classify", start), {"task": "sst2"}
    data = replace(data, task=replace(data.task, name="sst2"))
    modules: list[weakref.ref[Any]] = []

    def runs_of(stop: Any, *rates: float) -> dict[str, Any] | None:
        runs = {f"lr{lr:g}-seed{seed}": replace(settings, lr=lr, seed=seed) for lr in rates for seed in (1, 2)}

        def train_one(folder: Path, data: Data, settings: Settings) -> dict[str, Any] | None:
            assert not any(module() for module in modules)
            made = FineTuning(folder, data, start, settings, world, 2)
            modules.append(weakref.ref(made.module))
            return made.train(stop, unwatched(world))

        return run.train_missing(tmp_path, common, data, runs, world, train_one)

    assert runs_of(StopAt(1), 3e-3) is None
    first = runs_of(StopAt(), 3e-3)
    (left := tmp_path / "lr0.003-seed1/checkpoints").mkdir()
    again = runs_of(StopAt(), 3e-3, 1e-12)
    assert first is not None and again is not None and len(modules) == 1 + 2 + 2 and not left.exists()
    assert again["runs"][:2] == first["runs"] and [run["settings"]["seed"] for run in again["runs"]] == [1, 2] * 2
    assert json.loads((tmp_path / "summary.json").read_text()) == again and again["settings"] == common
    (result := tmp_path / "lr0.003-seed1/result.json").write_text("[]")
    with pytest.raises(ValueError, match=rf"{result}: is damaged; remove {result.parent} to train it again"):
        runs_of(StopAt(), 3e-3)
    best, other = (point["scores"]["dev"]["accuracy"]["mean"] for point in again["points"])
    assert best >= other and first["runs"][0]["name"] == "lr0.003-seed1"
    model = Path(again["best"]["model"])
    assert model.parent.parent == tmp_path and model.name == "best"
    assert save.load(model, world.device).described.task.name == "sst2"


def test_run_at_another_rate_is_refused(base, tmp_path, world, start) -> None:
    """The name of a run at a command's only rate lacks it: neither its result nor its checkpoint is another rate's."""
    data = data_of(base, "classify", start)
    assert train(tmp_path / "seed1", data, start, SETTINGS, world, StopAt(4)) is None
    with pytest.raises(ValueError, match=r"seed1: was trained at --lr 0\.003, this command says 1e-05; name another"):
        train(tmp_path / "seed1", data, start, change(lr=1e-5), world)
    result, given = train(tmp_path / "seed1", data, start, SETTINGS, world), {"seed1": change(lr=1e-5)}
    with pytest.raises(ValueError, match=r"seed1: was trained at --lr 0\.003, this command says 1e-05"):
        run.train_missing(tmp_path, {}, data, given, world, lambda *given: pytest.fail("trained again"))
    summary = run.train_missing(tmp_path, {}, data, {"seed1": SETTINGS}, world, lambda *given: None)
    assert summary is not None and summary["runs"] == [result]


@pytest.mark.parametrize("frozen", [{}, {"freeze": True, "layers": "3,4"}])
def test_stopped_run_ends_with_the_same_weights(frozen: dict[str, Any], base, tmp_path, world) -> None:
    settings, folders = change(epochs=4, dropout=0.1, **frozen), (tmp_path / "whole", tmp_path / "parts")
    whole = fine_tune(base, "classify", folders[0], world, settings)
    for ask in (1, 4, 12, 6):  # before the first update, inside a window, after an evaluation, inside a window
        assert fine_tune(base, "classify", folders[1], world, settings, StopAt(ask)) is None
    parts = fine_tune(base, "classify", folders[1], world, settings)
    assert (whole["name"], parts["name"]) == ("whole", "parts")
    assert {**parts, "seconds": 0, "name": ""} == {**whole, "seconds": 0, "name": ""}
    one, other = map(weights, folders)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    # Each figure is the mean over its window, whatever happened in between.
    figures = [
        [{k: v for k, v in line.items() if k.startswith("train/")} for line in lines(folder, "train/loss")]
        + [{k: v for k, v in line.items() if k != "time/train_seconds"} for line in lines(folder, "dev/accuracy")]
        for folder in folders
    ]
    assert len(figures[0]) > 7 and figures[0] == figures[1]


def test_settings_decide_first_weights(base, tmp_path, world, start) -> None:
    data = data_of(base, "classify", start)
    changed = ({}, {"seed": 2}, {"from_scratch": True}, {"freeze": True})
    made = [FineTuning(tmp_path / "a", data, start, change(**values), world, 5) for values in changed]
    kept, other, new, _ = (run_.module.state_dict() for run_ in made)
    name, head, frozen = "embeddings.position", "head.output.weight", made[3]
    assert torch.equal(kept[f"encoder.{name}"], start.weights[name])
    assert not torch.equal(new[f"encoder.{name}"], start.weights[name])
    assert not torch.equal(kept[head], other[head])
    pooler = frozen.frozen["head.pooler.weight"]
    assert torch.equal(pooler, start.weights["pooler.weight"]) and frozen.module.head.pooler.weight.equal(pooler)


def train_on_ranks(world: World, base: str, folder: str, settings: Settings) -> dict[str, Any]:
    return fine_tune(Path(base), "classify", Path(folder), world, settings)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("frozen", [{}, {"freeze": True, "layers": "3+4"}])
def test_ranks_and_micro_steps_train_the_same_model(frozen: dict[str, Any], base, tmp_path, world) -> None:
    # 60 items in batches of 8: the last update of an epoch holds 4, fewer than there are ranks x micro-steps
    alone, settings = tmp_path / "alone", change(zero=1, dropout=0.0, **frozen)
    fine_tune(base, "classify", alone, world, settings)
    results = run_ranks(2, train_on_ranks, str(base), str(tmp_path / "ranks"), replace(settings, micro_batch=1))
    assert results[0] == results[1]
    one, other = weights(alone), weights(tmp_path / "ranks")
    worst = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert worst < 2e-4, worst


@pytest.mark.parametrize("layers", ["last", "1,2"])
@pytest.mark.parametrize(("kind", "fields"), STARTS)
def test_fine_tuned_model_is_a_base(kind: str, fields: dict[str, Any], layers: str, tmp_path, capsys) -> None:
    """Of its encoder; of what stands before its added layer the pre-trained pooler, or a modern model's transform."""
    file = WRITERS[kind](tmp_path / "texts", 20, 1)
    best = finetuned.make(tmp_path, TASKS[kind], file, {"layers": layers, "freeze": layers != "last"}, fields=fields)
    saved = load_file(best / save.WEIGHTS)
    found = run.load_start(str(tmp_path), "")
    assert f"{tmp_path}: fine-tuned for custom: its encoder is used, its head is not\n" in capsys.readouterr().out
    encoder = {name: tensor for name, tensor in saved.items() if name.startswith("encoder.")}
    assert len(encoder) > 20 and all(found.weights[n.removeprefix("encoder.")].equal(t) for n, t in encoder.items())
    pooled, modern = kind == "classify" and layers == "last" and not fields, "kind" in fields and layers == "last"
    assert found.config.model.nsp == ("pooler.weight" in found.weights) == pooled
    if pooled:
        assert found.weights["pooler.weight"].equal(saved["head.pooler.weight"])
    if modern:
        assert found.trained_weights["mlm.norm_weight"].equal(saved["head.transform.norm_weight"])
    assert any(name.startswith("mlm.") for name in found.trained_weights) == modern
    assert found.tokenizer.sha256 == pretrained.load(tmp_path / "run").tokenizer.sha256
    with pytest.raises(ValueError, match="has no masked-LM head"):
        found.language_model(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"--tokenizer: .* is a fine-tuned model, which has its own"):
        run.load_start(str(tmp_path), "vocab.txt")


def test_other_task_starts_from_a_fine_tuned_model(base, tmp_path, world, capsys) -> None:
    """Of the run's folder, and of its export, whose added layer is not used either."""
    fine_tune(base, "tag", tmp_path / "tag", world, change(epochs=1))
    assert export.main(["--model", str(tmp_path / "tag"), "--output", str(tmp_path / "hf")]) == 0
    losses = []
    for source in ("tag", "hf"):
        start, folder = run.load_start(str(tmp_path / source), ""), tmp_path / f"from-{source}"
        result = train(folder, data_of(base, "classify", start), start, change(epochs=1), world)
        assert result["scores"]["dev"]["accuracy"] > 0.3
        losses.append([line["train/loss"] for line in lines(folder, "train/loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    text = "hf: its encoder is used, and these of its tensors are not: classifier.bias, classifier.weight\n"
    assert text in capsys.readouterr().out


def result(seed: int, lr: float, accuracy: float, f1: float, seconds: float = 10.0) -> dict[str, Any]:
    scores = {"dev": {"accuracy": accuracy, "f1": f1}, "test": {"accuracy": 0.5, "f1": 0.25}}
    return {"settings": {"seed": seed, "lr": lr}, "scores": scores, "seconds": seconds}


def test_point_is_mean_and_deviation_of_seeds() -> None:
    runs = [result(1, 2e-5, 0.70, 0.9), result(2, 2e-5, 0.74, 0.7), result(1, 5e-5, 0.80, 0.1, 30.0)]
    best, other = run.summarise(runs, "accuracy")
    assert best["point"] == {"lr": 5e-5} and best["runs"] == 1 and best["seconds"] == 30
    assert best["scores"]["dev"]["accuracy"] == {"mean": 0.80, "std": 0.0}
    # 0.04 / sqrt(2)
    assert other["scores"]["dev"]["accuracy"] == pytest.approx({"mean": 0.72, "std": 0.0282842712})
    assert [row["point"]["lr"] for row in run.summarise(runs, "f1")] == [2e-5, 5e-5]
    errors = [run_ | {"scores": {"dev": {"mae": run_["scores"]["dev"]["accuracy"]}}} for run_ in runs]
    assert [row["point"]["lr"] for row in run.summarise(errors, "mae")] == [2e-5, 5e-5]
    lines = run.table([best, other]).splitlines()
    assert " ".join(lines[0].split()) == "lr runs dev accuracy dev f1 test accuracy test f1 seconds"
    assert lines[2].split()[:5] == ["2e-05", "2", "0.7200", "±", "0.0283"]


def test_id_column_is_a_common_setting(base, start) -> None:
    named = replace(TASKS["classify"], id="key")
    assert run.common_settings(named, LABELS["classify"], start, {}, SETTINGS, 0)["id"] == "key"


def test_output_folder_of_another_command_is_refused(tmp_path: Path, world) -> None:
    files = {"train": ["a"], "dev": ["b"]}
    output, common = tmp_path / "out", {"task": "sst2", "epochs": 3, "files_sha256": files}
    output.mkdir()
    (output / f".{run.COMMON}.0a1b2c3d.tmp").touch()  # of a process that was killed while it wrote the settings
    for _ in range(2):
        run.claim(output, common, world)
    for changed, word in (
        ({"epochs": 9}, "epochs=3, this command says 9"),
        ({"extra": 1}, "extra=None"),
        ({"files_sha256": {"train": ["a"], "dev": ["c"]}}, "was made with another dev file; name another --output"),
        ({"files_sha256": files | {"test": ["a"]}}, "was made with no test file"),
        ({"files_sha256": {"train": ["a"]}}, "was made with another dev file"),
    ):
        with pytest.raises(ValueError, match=word):
            run.claim(output, common | changed, world)
    assert json.loads((output / run.COMMON).read_text()) == common
    # Made by a version without these options.
    run.claim(output, common | {"freeze": False, "layers": "last", "id": ""}, world)
    with pytest.raises(ValueError, match="was made with id='', this command says 'key'"):
        run.claim(output, common | {"id": "key"}, world)
    with pytest.raises(ValueError, match="was made with freeze=False, this command says True"):
        run.claim(output, common | {"freeze": True}, world)
    run.claim(output, common, world)
    for damaged in ("", "[]"):
        (output / run.COMMON).write_text(damaged)
        with pytest.raises(ValueError, match="damaged"):
            run.claim(output, common, world)
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"holds out and no settings\.json"):
        run.claim(tmp_path, {}, world)
    for path in (tmp_path / "thesis.tex", tmp_path / "thesis.tex" / "sst2"):
        with pytest.raises(ValueError, match=r"thesis\.tex: is a file; name a folder as --output"):
            run.refuse(path, common)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "thesis.tex"]

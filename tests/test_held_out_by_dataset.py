"""Held-out figures of each dataset of a mixture, in training and afterwards."""

import json
import math

import numpy as np
import pytest

from megabert import evaluation
from megabert.commands import report
from megabert.commands.evaluate import evaluate_run
from megabert.data.mixture import distinct_names
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.helpers.golden_runs import DATA, SMALL, held_out_of, random_rows, trained
from tests.helpers.job import Job


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A dataset of random tokens, with a held-out split."""
    folder = tmp_path_factory.mktemp("more") / "other"
    held_out = random_rows(folder / "held_out", 12, seed=1)
    return random_rows(folder, 40, seed=0, held_out=held_out_of(held_out, 12))


def bytes_per_token(folder):
    """Counted token by token."""
    dataset = Dataset(folder)
    tokens = Tokenizer.load(dataset.tokenizer_path).token_bytes()
    sizes = [len(tokens[i]) for i in dataset.read(np.arange(dataset.rows)).ids.ravel().tolist() if i > 4]
    return sum(sizes) / len(sizes)


def test_bytes_of_a_causal_models_tokens_count_its_separators(other):
    """Each [SEP] is predicted, and has no bytes."""
    dataset = Dataset(other / "held_out")
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    ids = dataset.read(np.arange(dataset.rows)).ids
    words, separators = (ids > 4).sum(), (ids == tokenizer.special_ids["sep"]).sum()
    masked, causal = (evaluation.bytes_per_token(dataset, tokenizer, causal) for causal in (False, True))
    assert causal == pytest.approx(masked * words / (words + separators)) and separators > 0


@pytest.mark.parametrize("phases", [False, True])
def test_each_dataset_of_a_run_is_evaluated(world, tmp_path, other, phases, monkeypatch):
    mix = f'data.mix={{"{other}"=0.25}}'
    found = trained(world, tmp_path, f"phases=[{{share=1}},{{share=1,{mix}}}]" if phases else mix)
    alone = {"dataset": evaluate_run(tmp_path, str(DATA)), "other": evaluate_run(tmp_path, str(other))}
    assert found["eval/mlm_loss"] == found["eval/loss_by_dataset/dataset"]
    for name, folder in (("dataset", DATA), ("other", other)):
        loss = found[f"eval/loss_by_dataset/{name}"]
        assert loss == pytest.approx(alone[name]["eval/mlm_loss"], rel=1e-5)
        bits = loss / math.log(2) / bytes_per_token(folder / "held_out")
        assert found[f"eval/bits_per_byte_by_dataset/{name}"] == pytest.approx(bits)
    open_local = evaluation.held_out
    monkeypatch.setattr(
        evaluation, "held_out", lambda place: open_local(place.removeprefix("https://h").partition("?")[0])
    )
    both = evaluate_run(tmp_path, [f"https://h{DATA}?key=secret", str(other)])
    assert both == {name: pytest.approx(value, rel=1e-5) for name, value in (found | {"step": 2}).items()}
    assert not any("by_dataset" in name for name in alone["other"])
    assert report.main([str(tmp_path)]) == 0
    assert "Loss, held out, other" in (tmp_path / "report.html").read_text()


def test_each_phase_evaluates_the_datasets_of_all(world, tmp_path, other):
    """Masked as the last phase is, with the rotary base of the phase the run is in."""
    second = f'data.path="{other}", model.rope_theta=50.0, data.masking.rate=0.4'
    overrides = (
        *("model.kind=modern", "model.norm=pre", "model.nsp=false", "eval.interval=1", "optimizer.lr=0.1"),
        *(f"phases=[{{share=0.5}},{{share=0.5,{second}}}]", "schedule.name=constant"),
    )
    for step in (1, 2):
        found = trained(world, tmp_path, *overrides, stop_after=step)
        assert 0.35 < found["eval/predictions"] / (8 * 64) < 0.4
        alone = evaluate_run(tmp_path, [str(DATA), str(other)])
        assert found == {name: pytest.approx(alone[name], rel=1e-6) for name in found}
        assert sum("loss_by_dataset" in name for name in found) == 2


def test_a_member_without_a_split_is_named(world, tmp_path, caplog):
    plain = random_rows(tmp_path / "plain", 40, seed=2)
    found = trained(world, tmp_path / "run", f'data.mix={{"{plain}"=0.5}}')
    assert f"{plain} has no held-out split: the run is not evaluated on it" in caplog.text
    assert [name for name in found if "loss_by_dataset" in name] == ["eval/loss_by_dataset/dataset"]


def test_names_tell_folders_apart():
    assert distinct_names(["data/wiki", "/data/novels"]) == ["wiki", "novels"]
    assert distinct_names(["old/train", "new/train", "new/more"]) == ["old_train", "new_train", "new_more"]
    assert distinct_names(["a", "./a"]) == ["1_a", "2_a"]


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_evaluate_each_dataset(tmp_path, other):
    job = Job(DATA, tmp_path / "run", *SMALL, f'data.mix={{"{other}"=0.25}}', "zero.stage=3")
    assert job.codes() == [0, 0], job.output
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    alone = evaluate_run(tmp_path / "run", [str(DATA), str(other)])
    each = {name: value for name, value in alone.items() if "by_dataset" in name}
    assert len(each) == 4 and {name: last[name] for name in each} == pytest.approx(each, rel=1e-5)

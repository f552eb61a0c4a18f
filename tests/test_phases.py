"""Runs in phases: interrupted anywhere, they are the same run. A causal start is the phase that has a key of its own."""

import json
import math
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megabert import config as configuration
from megabert import hf
from megabert.checkpoint import load_weights, write_start
from megabert.commands import verify
from megabert.commands.evaluate import evaluate_run
from megabert.config import ScheduleConfig, list_phases, phase_at
from megabert.data.mixture import open_mixture, skip_rows_of_earlier_phases
from megabert.data.shards import Dataset
from megabert.optim.schedule import learning_rate, phase_rate
from tests.helpers import golden_runs
from tests.helpers.forked import Forked
from tests.helpers.golden_runs import DATA, random_rows
from tests.helpers.job import Job
from tests.helpers.loop import Killed, make_spike
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import flip
from tests.integration.conftest import metrics

STEPS = 10
SMALL = (
    *(*golden_runs.SMALL, f"data.path={DATA}", "model.nsp=false", "precision=auto", "optimizer.lr=3e-3"),
    *(f"schedule.total_steps={STEPS}", "schedule.warmup_steps=2", "schedule.name=wsd"),
)
SLOW = """
from megabert.trainer import Trainer
def report(self, update, seconds, do=Trainer.send_report):
    do(self, update, 60.0)
Trainer.send_report = report
"""
# causal for the first 4 of 10 updates, then masked LM at 30%
RECIPE = ("objective.causal_share=0.4", "data.masking.rate=0.3", "eval.rate=0.15")
FIGURES = ("train/loss", "train/grad_norm", "train/lr", "train/objective", "train/phase", "data/row_digest")


def config(*overrides):
    return configuration.load("tiny", [*SMALL, *RECIPE, *overrides])


def opened(world, folder, *overrides, **options):
    return golden_runs.opened(world, folder, *SMALL, *RECIPE, *overrides, **options)


def trained(world, folder, *overrides, stops=(None,), patch=lambda trainer: None, **options):
    """Log lines by step, and the weights, of a run that was stopped at `stops`, its trainers changed by `patch`."""
    for stop_after in stops:
        trainer = opened(world, folder, *overrides, stop_after=stop_after, **options)
        patch(trainer)
        try:
            assert trainer.train()
            weights = trainer.engine.consolidated_weights()
        finally:
            trainer.close()
    return logged(folder), weights


def logged(folder, name="train/loss"):
    """Log lines of updates, or those with another figure, by step."""
    return {line["step"]: line for line in metrics(Path(folder)) if name in line}


def column(run, name):
    """A figure of each update."""
    return [line[name] for line in run[0].values()]


def same(ours, theirs, steps=STEPS):
    assert list(ours[0]) == list(theirs[0]) == list(range(1, steps + 1))
    for step, line in theirs[0].items():
        for name in FIGURES:
            assert ours[0][step].get(name) == line.get(name), (step, name)
    for name, weight in theirs[1].items():
        assert torch.equal(ours[1][name], weight), name


def test_runs_stopped_at_the_change_are_the_same(world, tmp_path):
    straight = trained(world, tmp_path / "straight")
    assert column(straight, "train/objective") == ["causal"] * 4 + ["masked"] * 6
    assert all(loss > 0 for loss in column(straight, "train/mlm_loss"))
    rates = column(straight, "train/lr")
    assert max(rates) == 3e-3 and rates[-1] < 1.7e-3 and rates[3:7] == [3e-3] * 4
    same(trained(world, tmp_path / "broken", "data.workers=2", stops=(4, None)), straight)
    whole, broken = ((tmp_path / run / "samples.jsonl").read_text() for run in ("straight", "broken"))
    assert whole == broken and whole.count('"step"') == 2  # start and end
    starts = [json.loads(line) for line in (tmp_path / "broken" / "starts.jsonl").read_text().splitlines()]
    assert [(start["step"], start["ranks"]) for start in starts] == [(0, 1), (4, 1)]


def test_held_out_figures_are_of_masked_lm_throughout(world, tmp_path):
    trainer = opened(world, tmp_path, stop_after=2)  # before the change
    assert trainer.train()
    trainer.evaluate()
    during = trainer.last_eval
    trainer.close()
    assert 0.14 < during["eval/predictions"] / (8 * 64) < 0.16
    found = evaluate_run(str(tmp_path), str(DATA))
    assert found["eval/mlm_loss"] == pytest.approx(during["eval/mlm_loss"], rel=2e-3)
    assert found["eval/predictions"] == during["eval/predictions"]
    weights, state = load_weights(tmp_path)
    # as of a masked run that was trained on a GPU, whose attention this machine has not
    state["config"]["ops"]["attention"], state["config"]["objective"]["causal_share"] = "varlen", 0.0
    write_start(tmp_path / "elsewhere", weights, state)
    elsewhere = evaluate_run(str(tmp_path / "elsewhere"), str(DATA))
    assert elsewhere["eval/mlm_loss"] == pytest.approx(found["eval/mlm_loss"], rel=1e-5)
    shutil.rmtree(tmp_path / "elsewhere")
    converted = {"config": state["config"], "tokenizer": state["tokenizer"], "dataset": "none, converted from hf"}
    write_start(tmp_path / "elsewhere", weights, converted)  # as `convert` writes it
    with pytest.raises(ValueError, match="converted from hf"):
        opened(world, tmp_path / "elsewhere")


@pytest.mark.slow
def test_by_minutes_the_change_follows_the_clock(world, tmp_path):
    """Seconds of training of an update are set here: 0.06 of 0.5 minutes each, from the third on 9."""
    budget = ("schedule.by=minutes", "schedule.budget_minutes=0.5", "data.workers=2")

    def timed(trainer):
        report, times = trainer.send_report, iter([0.06, 0.06, *[9.0] * STEPS][trainer.state.step :])
        trainer.send_report = lambda update, _: report(update, next(times))

    found = trained(world, tmp_path, *budget, stops=(4, 7), patch=timed)
    assert column(found, "time/train_seconds") == [0.06, 0.12, 9.12, 18.12, 27.12, 36.12]
    assert column(found, "train/objective") == ["causal"] * 4 + ["masked"] * 2  # 12 s are 40% of 30 s
    # by a clock of its own, which is at the end of the budget after the first update
    driver, output = tmp_path.parent / "slow.py", tmp_path.parent / "output"
    driver.write_text(SLOW)
    again = Forked(["replay", str(tmp_path), "--from", "4"], os.environ, output, driver=str(driver))
    assert again.wait(60) == 0 and "of steps 5 to 6 are equal bit for bit" in output.read_text(), output.read_text()


def test_a_change_of_objective_is_no_spike(world, tmp_path):
    """Causal at a loss that hardly moves any more, then masked LM, whose loss is another."""
    guard = ("spikes.policy=skip", "spikes.window=8", "spikes.threshold=3.0", "schedule.total_steps=40")
    overrides = (*SMALL, *guard, "objective.causal_share=0.9", "optimizer.lr=1e-8", "data.masking.rate=0.02")
    trainer = golden_runs.opened(world, tmp_path, *overrides)
    assert trainer.train()
    losses = trainer.spike_policy.state()
    trainer.close()
    assert list(losses) == ["masked"] and len(losses["masked"]) == 4 and trainer.state.phase_starts == [0, 36]


# every third update is causal
MIX = ("objective.causal_share=0", "data.masking.causal_every=3")


def test_mixed_objectives_stopped_anywhere_are_the_same(world, tmp_path):
    straight = trained(world, tmp_path / "straight", *MIX)
    assert column(straight, "train/objective") == (["masked"] * 2 + ["causal"]) * 3 + ["masked"]
    losses = column(straight, "train/mlm_loss")
    assert len(set(losses)) == STEPS and max(losses[0], losses[2]) < 1.1 * math.log(800)
    same(trained(world, tmp_path / "broken", *MIX, "data.workers=2", stops=(2, 3, None)), straight)
    found = evaluate_run(str(tmp_path / "broken"), str(DATA))
    assert 0.14 < found["eval/predictions"] / (8 * 64) < 0.16


def figures_of_mix(world, folder):
    exact = ("precision=fp32", "model.dropout=0.0", "model.attention_dropout=0.0", f"zero.stage={world.size}")
    lines, _ = trained(world, Path(folder), *MIX, *exact)
    return [(m["train/objective"], m["train/loss"], m["train/grad_norm"]) for m in lines.values()]


@pytest.mark.slow
@pytest.mark.dist
def test_mixed_objectives_are_equal_on_two_ranks(world, tmp_path):
    alone = figures_of_mix(world, str(tmp_path / "one"))
    two, _ = run_ranks(2, figures_of_mix, str(tmp_path / "two"))
    assert len(alone) == STEPS
    for (objective, *values), (its, *others) in zip(alone, two, strict=True):
        assert objective == its and values == pytest.approx(others, rel=1e-4)


@pytest.mark.slow
def test_a_start_from_frequencies_survives_a_resume(world, tmp_path):
    frequencies = ("model.frequency_bias=true", "model.zero_init=true")
    straight = trained(world, tmp_path / "straight", *frequencies)
    first = metrics(tmp_path / "straight")[0]
    assert first["step"] == 0 and first["eval/mlm_loss"] < 6.0 < math.log(800) - 0.6
    same(trained(world, tmp_path / "broken", *frequencies, stops=(5, None)), straight)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two datasets of longer rows with the tokenizer of DATA."""
    names = ("long", "best")
    return {name: random_rows(tmp_path_factory.mktemp(name), 96, seed, 128, 4) for seed, name in enumerate(names)}


def longer(folders):
    """Keys of a phase of rows of 128 under a larger rotary base."""
    return f'data.path="{folders["long"]}", batch={{global_size=4, micro_size=2}}, model.rope_theta=5e4'


def phased(*phases):
    """Settings of a run of these phases, at a constant rate."""
    shape = ("model.kind=modern", "model.norm=pre", "model.window=32", "schedule.name=constant")
    tables = ",".join("{" + phase + "}" for phase in phases)
    return (*shape, "objective.causal_share=0", f"phases=[{tables}]")


def three(folders):
    """4 updates of rows of 64, 3 of rows of 128 under a larger rotary base, then 3 of decay with other text mixed in."""
    long = longer(folders)
    last = f'data.mix={{"{folders["best"]}"=0.5}}, data.masking.rate=0.2, schedule.name="sqrt", optimizer.lr=1e-3'
    return phased("share=4", f"share=3,{long}", f"share=3,{long},{last}")


def test_phases_begin_where_their_shares_say():
    tables = "phases=[{share=100},{share=110},{share=90}]"
    phases = list_phases(config("objective.causal_share=0", "schedule.total_steps=300", tables))
    assert [sum(phase_at(phases, step / 300) == number for step in range(300)) for number in range(3)] == [100, 110, 90]
    tenths = list_phases(config("objective.causal_share=0", "phases=[{share=0.1},{share=0.2},{share=0.7}]"))
    assert [phase_at(tenths, step / 10) for step in range(10)] == [0, 1, 1, *[2] * 7]
    assert list_phases(config("objective.causal_share=0.189"))[0].end == 0.189


def test_micro_batches_are_fitted_to_each_phase(world, tmp_path):
    """Not to the run: a larger batch of a phase is not divided by the run's smaller one."""
    tables = "phases=[{share=0.5},{share=0.5,batch.global_size=8}]"
    trainer = opened(world, tmp_path, "objective.causal_share=0", "batch.global_size=3", "batch.micro_size=8", tables)
    assert [phase.batch.micro_size for phase in trainer.workload.phases] == [3, 8]
    assert trainer.train() and trainer.engine.accumulation == 1
    trainer.close()


def test_another_dataset_has_its_own_row_length():
    kept, other = 'data.mix={"b"=0.5}', 'data.path="b"'
    tables = f"phases=[{{share=0.2}},{{share=0.2,{kept}}},{{share=0.2,{other}}},{{share=0.4,{other},data.seq_len=256}}]"
    phases = list_phases(config("objective.causal_share=0", "data.seq_len=64", tables))
    assert [phase.config.data.seq_len for phase in phases] == [64, 64, 0, 256]


def test_phases_have_their_peak_or_own_schedule():
    own = 'optimizer.lr=2.0, schedule={name="linear", budget_warmup=0.5, final_ratio=0.2}'
    parts = f"phases=[{{share=0.5}},{{share=0.3,optimizer.lr=1.0}},{{share=0.2,{own}}}]"
    steps = ("schedule.total_steps=20", "schedule.name=constant", "optimizer.lr=4.0")
    cfg = config("objective.causal_share=0", *steps, parts)
    phases = list_phases(cfg)
    rates = [phase_rate(phases[phase_at(phases, n / 20)], cfg.schedule, n) for n in range(20)]
    assert rates == pytest.approx([2.0, *[4.0] * 9, *[1.0] * 6, 1.0, 2.0, 2.0, 1.2])
    # by steps a phase of the whole run equals a run
    (whole,) = list_phases(config("objective.causal_share=0", *steps, f"phases=[{{share=1,{own}}}]"))
    alike = ScheduleConfig(name="linear", total_steps=20, warmup_steps=10, final_ratio=0.2)
    for n in range(20):
        assert phase_rate(whole, cfg.schedule, n) == pytest.approx(learning_rate(alike, 2.0, n)), n
    short = configuration.load("", ["schedule.name=sqrt", "schedule.total_steps=4", "schedule.warmup_steps=0"])
    rates = [phase_rate(list_phases(short)[0], short.schedule, n) for n in range(3)]
    assert rates == pytest.approx([1e-4, 5e-5, 1e-4 * (1 - 0.5**0.5)])


def test_later_phases_leave_out_rows_already_taken(folders):
    long, best = str(folders["long"]), str(folders["best"])
    first, second = open_mixture(DATA, {}), open_mixture(long, {})
    datasets = [first, second, second, open_mixture(long, {best: 0.5}), open_mixture(best, {})]
    sizes, starts = [8, 4, 2, 4, 4], [0, 4, 7, 9, 11]
    positions = [skip_rows_of_earlier_phases(datasets, sizes, starts[: n + 1]) for n in range(5)]
    # the second phase of the same data continues its order; of a mixture a whole window is taken
    assert positions == [0, 0, 12, 0, 0]
    taken = [Dataset(long).order(3, np.arange(16))[0], *(datasets[3].order(3, np.arange(8)))]
    of_long = taken[1][taken[1] < 96]
    assert 0 < len(of_long) < 8 and not set(taken[0]) & set(of_long)
    epochs = datasets[4].order(3, np.arange(1))[1]
    assert epochs == [2048 // 96] == [datasets[4].epoch(0)]


@pytest.mark.slow
def test_three_phases_stopped_anywhere_are_the_same(world, tmp_path, folders):
    recipe = three(folders)
    straight = trained(world, tmp_path / "straight", *recipe)
    assert column(straight, "train/phase") == [1] * 4 + [2] * 3 + [3] * 3
    rates = [1.5e-3, *[3e-3] * 6, *(1e-3 * (1 - (n / 3) ** 0.5) for n in range(3))]
    assert column(straight, "train/lr") == pytest.approx(rates)
    # a checkpoint has the rotary base that its weights were trained with
    for stop in range(1, STEPS):
        trained(world, tmp_path / "broken", *recipe, "data.workers=1", stops=(stop,))
        assert hf.load(tmp_path / "broken").config.model.rope_theta == (1e4 if stop <= 4 else 5e4)
    same(trained(world, tmp_path / "broken", *recipe), straight)
    *_, end = logged(tmp_path / "broken", "eval/mlm_loss").values()
    found = evaluate_run(str(tmp_path / "broken"), str(DATA))
    assert found["eval/mlm_loss"] == pytest.approx(end["eval/mlm_loss"], rel=2e-3)


def test_verify_reads_the_data_of_every_phase(world, tmp_path, folders, capsys):
    run, places = tmp_path / "run", [DATA, folders["long"], folders["best"]]
    lengths = ("schedule.total_steps=3", "data.seq_len=64", "phases.3.data.seq_len=128")
    trained(world, run, *three(folders), *lengths, *(f"phases.{number}.share=1" for number in (1, 2, 3)))
    assert verify.main([str(run)]) == 0
    rows = sum(Dataset(place).rows for place in places)
    assert f"data         {rows:,} rows of {', '.join(map(str, places))}: every byte" in capsys.readouterr().out
    for number, place in enumerate(places):
        copy = Path(shutil.copytree(place, tmp_path / str(number)))
        moved = ["--data", *map(str, places[:number]), str(copy)]
        assert verify.main([str(run), *moved]) == 0
        shard = max(copy.glob("*.tar"))
        flip(shard, shard.stat().st_size // 2)
        assert verify.main([str(run), *moved]) == 2
        assert f"error: {shard}: " in capsys.readouterr().err
    other = [DATA, folders["best"]]
    assert verify.main([str(run), "--data", *map(str, other)]) == 2
    assert "best0: is not the dataset of phase 2 of this run (another fingerprint)" in capsys.readouterr().err
    assert verify.main([str(run), "--data", *map(str, other * 2)]) == 2
    assert "--data names 4 folders; the run has 3: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_resume_names_what_changed_in_phases(world, tmp_path, folders, caplog):
    recipe = three(folders)
    trained(world, tmp_path, *recipe, stops=(5,))
    for change, message in (
        ("phases.1.batch.global_size=4", r"phases\.1: batch\.global_size is 4 but the checkpoint was made with 8"),
        (f"phases.2.data.path={folders['best']}", r"phases\.2: dataset fingerprint is"),
        ("phases.2.model.rope_theta=6e4", r"phases\.2: model\.rope_theta is 60000\.0 but"),
        ("phases=[]", "the run is in phase 2, but the given phases and budget put it back in phase 1"),
    ):
        with pytest.raises(ValueError, match=f"cannot resume: {message}"):
            opened(world, tmp_path, *recipe, change)
    opened(world, tmp_path, *recipe, "phases.3.optimizer.lr=2e-3", "phases.2.data.masking.rate=0.25").close()
    for change in ("phases.3.optimizer.lr was 0.001 and is 0.002", "phases.2.data.masking.rate was None and is 0.25"):
        assert f"{change} from here on" in caplog.text
    assert "phases was" not in caplog.text


@pytest.mark.slow
def test_a_finished_run_is_extended_by_a_phase(world, tmp_path, folders):
    """Of the first phase's data again, behind its rows; the whole is the run that had three phases from the start."""
    first = ("share=4", f"share=6,{longer(folders)}")
    extended = (*phased(*first, "share=2"), "schedule.total_steps=12")
    straight, run = trained(world, tmp_path / "straight", *extended), tmp_path / "run"
    trained(world, run, *phased(*first))
    with pytest.raises(ValueError, match=r"this run is finished, .* add --extend"):
        opened(world, run, *extended)
    same(trained(world, run, *extended, extend=True), straight, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spike", "interval", "cursors", "change"),
    [
        (6, 1, range(13), 4),
        (3, 1, range(14), 8),
        # seen on entering the second phase, after an update that is then forgotten
        (3, 3, [*range(5), *range(4, 14)], 8),
    ],
)
def test_a_rollback_continues_in_its_phase(world, tmp_path, folders, spike, interval, cursors, change):
    """The loss of update `spike` of the data is 50 times as high; the second phase begins with update `change` of the data."""
    overrides = (
        *phased("share=4", f"share=6,{longer(folders)}"),
        *("spikes.policy=rollback", "spikes.window=8", "spikes.threshold=300", f"log.interval={interval}"),
    )
    found = []
    for name, stops in (("straight", (None,)), ("stopped", (8, None))):
        seen = []
        patch = partial(make_spike, at=spike, seen=seen)
        found.append(trained(world, tmp_path / name, *overrides, stops=stops, patch=patch)[1])
        assert [cursor for _, cursor, _ in seen] == list(cursors)
        state = load_weights(tmp_path / name)[1]
        assert state["phase_starts"] == [0, change] and state["step"] == STEPS
        assert (tmp_path / name / "trouble.jsonl").read_text().count("\n") == 1
        for phase, cursor, row_ids in seen:
            assert phase == 1 + (cursor >= change)
            dataset, size, first = (Dataset(DATA), 8, 0) if phase == 1 else (Dataset(folders["long"]), 4, change)
            positions = (cursor - first) * size + np.arange(size)
            assert row_ids == dataset.order(config().seed, positions)[0].tolist(), cursor
    assert all(torch.equal(found[1][name], weight) for name, weight in found[0].items())


TOKENS = 4900  # of full rows of 64 nearly 10 updates of 8


@pytest.mark.slow
def test_phases_by_tokens_stopped_are_the_same(world, tmp_path, folders):
    tables = phased("share=0.5", f'share=0.5,{longer(folders)},schedule.name="linear"')
    recipe = (*tables, "schedule.by=tokens", f"schedule.budget_tokens={TOKENS}", "schedule.total_steps=20")
    straight = trained(world, tmp_path / "straight", *recipe)
    tokens, phases = (column(straight, name) for name in ("data/tokens", "train/phase"))
    assert phases == [1] + [1 + (used >= TOKENS / 2) for used in tokens[:-1]] and phases.count(2) > 3
    assert tokens[-2] < TOKENS <= tokens[-1]
    change = phases.index(2)
    stops = (change - 1, change, change + 1, change + 2, change + 3, None)
    same(trained(world, tmp_path / "stopped", *recipe, stops=stops), straight, len(tokens))


@pytest.mark.slow
def test_phases_by_minutes_repeat_as_first_timed(world, tmp_path, folders):
    """Updates of 6 seconds each: stopped in the second phase the run is the same. Killed there, it repeats updates of both phases
    at their first rates, though each takes no time any more."""
    overrides = (
        *phased("share=0.4", f'share=0.6,{longer(folders)},schedule.name="linear"'),
        *("schedule.by=minutes", "schedule.budget_minutes=1.0", "schedule.total_steps=20", "checkpoint.interval=3"),
        "checkpoint.asynchronous=false",
    )

    def timed(name, seconds, stop_after=None, killed_after=-1):
        def patch(trainer):
            report, train_update = trainer.send_report, trainer.engine.train_update

            def update(*arguments):
                if trainer.state.step == killed_after:
                    raise Killed
                return train_update(*arguments)

            trainer.send_report = lambda update, _: report(update, seconds)
            trainer.engine.train_update = update

        return trained(world, tmp_path / name, *overrides, stops=(stop_after,), patch=patch)

    straight = timed("straight", 6.0)
    assert column(straight, "train/phase") == [1] * 4 + [2] * 6
    for stop_after in (6, 8):
        timed("stopped", 6.0, stop_after)
    same(timed("stopped", 6.0), straight)
    with pytest.raises(Killed):
        timed("killed", 6.0, killed_after=5)
    before = logged(tmp_path / "killed")
    again, _ = timed("killed", 0.0, 5)
    assert [line["train/phase"] for line in before.values()] == [1] * 4 + [2]
    for step in (4, 5):
        assert [again[step][name] for name in FIGURES] == [before[step][name] for name in FIGURES], step


# ends every rank before its share of an update of the data is trained
KILL = """
import os
from megabert.engine import Engine
def update(self, update, *rest, do=Engine.train_update):
    if update.step == AT:
        os.kill(os.getpid(), 9)
    return do(self, update, *rest)
Engine.train_update = update
"""


@pytest.mark.slow
@pytest.mark.dist
def test_kills_in_and_between_phases_leave_no_trace(tmp_path, folders):
    """In each of three phases and at both changes, on two ranks; then on one rank, which reads the same rows."""
    options = [*SMALL, *three(folders), "schedule.warmup_steps=2", "checkpoint.interval=2"]

    def figures(run):
        return {step: [line[name] for name in FIGURES] for step, line in logged(run).items()}

    assert Job(DATA, tmp_path / "straight", *options).codes() == [0, 0]
    for at in (1, 4, 5, 7, 9):
        assert all(Job(DATA, tmp_path / "killed", *options, driver=f"AT = {at}\n{KILL}").codes())
    last = Job(DATA, tmp_path / "killed", *options)
    assert last.codes() == [0, 0], last.output
    whole = figures(tmp_path / "straight")
    assert list(whole) == list(range(1, STEPS + 1)) and figures(tmp_path / "killed") == whole
    assert all(Job(DATA, tmp_path / "fewer", *options, driver=f"AT = 5\n{KILL}").codes())
    alone = Job(DATA, tmp_path / "fewer", *options, ranks=1)
    assert alone.codes() == [0], alone.output
    for step, values in figures(tmp_path / "fewer").items():
        assert values[2:] == whole[step][2:] and values[0] == pytest.approx(whole[step][0], rel=1e-3), step

"""The configuration refuses unknown keys and contradictions by name, and resolves to the expected DeepSpeed dict."""

import re

import pytest

from megabert import config as c
from megabert.common.arguments import presets


def test_parts_of_a_mixture_have_one_order() -> None:
    """A saved configuration is sorted, and the order decides that of the rows."""
    assert list(c.load("tiny", ['data.mix={"z"=0.2, "a"=0.3}']).data.mix) == ["a", "z"]


def test_every_preset_loads() -> None:
    large = [f"large_phase{phase}{memory}" for phase in (1, 2) for memory in ("", "_141gb", "_80gb")]
    names = ["babylm_100m", "babylm_10m", "base", "base_modern", "base_modernbert", "large_24h", "large_modern", *large]
    names += ["mini", "mini_modern", "quickstart", "small", "tiny", "tiny_phases"]
    assert presets() == names
    assert all(c.accumulation(c.load(name), 1) >= 1 for name in names)
    for name, shape in ("base", (12, 768, 12, 3072)), ("large_phase2_80gb", (24, 1024, 16, 4096)):
        model = c.load(name).model
        assert (model.layers, model.hidden, model.heads, model.ffn) == shape


def test_a_file_extends_a_preset(tmp_path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('extends = "large_phase2"\nbatch.micro_size = 4\n')
    assert c.load(str(path)) == c.load("large_phase2", ["batch.micro_size=4"])
    sources = c.value_sources(str(path), ["schedule={power=2.0}"])
    assert sources["optimizer.lr"] == "preset large_phase2" and sources["batch.micro_size"] == f"file {path}"
    assert sources["schedule.power"] == "command line" and "schedule" not in sources
    for wrong in ('"larg"', '"own.toml"', "3"):
        path.write_text(f"extends = {wrong}")
        with pytest.raises(ValueError, match=r"own\.toml: extends=.* is not a preset; presets: babylm_100m, "):
            c.load(str(path))


def test_a_table_changes_what_it_has() -> None:
    """Of a section, and of a phase; a mixture is a value."""
    preset = c.load("mini_modern")
    changed = c.load("mini_modern", ["optimizer={lr=0.5}", 'data.masking={strategy="word"}'])
    assert changed.optimizer == c.replace(preset.optimizer, "lr", 0.5)
    assert changed.data.masking == c.replace(preset.data.masking, "strategy", "word")
    mixed = ['data.mix={"a"=0.2}', 'data.mix={"b"=0.3}']
    assert list(c.load("tiny", mixed).data.mix) == ["b"]
    two = "phases=[{share=0.5, batch.global_size=8, batch.micro_size=4},{share=0.5}]"
    phase = c.load("tiny", [two, "phases.1.batch={micro_size=2}"]).phases[0]
    assert phase.changes == {"batch": {"global_size": 8, "micro_size": 2}}


@pytest.mark.parametrize(
    ("own", "overrides", "message"),
    [
        ("budget_minutes = 5.0", [], "schedule.budget_minutes: has no effect without schedule.by=minutes; set both"),
        ("", ["schedule={budget_tokens=5}"], "schedule.budget_tokens: has no effect without schedule.by=tokens"),
        ("", ["schedule.budget_warmup=0.1"], "schedule.budget_warmup: has no effect without a budget"),
        ("", ["schedule.decay_share=0.1"], "schedule.decay_share: has no effect without schedule.name=wsd"),
        ("power = 2.0", [], "schedule.power: has no effect without schedule.name=polynomial"),
        ('name = "constant"', ["schedule.final_ratio=0.1"], "schedule.final_ratio: has no effect with schedule.name="),
        (
            'by = "minutes"\nbudget_minutes = 1.0',
            ["schedule.warmup_steps=3"],
            "schedule.warmup_steps: has no effect with ",
        ),
        # switched on the command line, or by a phase, or 0
        ('by = "minutes"\nbudget_minutes = 1.0', ["schedule.by=steps", "schedule.warmup_steps=3"], ""),
        ("decay_share = 0.1", ['phases=[{share=1.0, schedule.name="wsd"}]'], ""),
        ("", ["schedule.budget_minutes=0"], ""),
        ('by = "minutes"', ["schedule.budget_minutes=5.0"], ""),  # of the command line, in the file's unit
    ],
)
def test_a_setting_without_effect_is_refused(own, overrides, message, tmp_path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f"[schedule]\n{own}\n")
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            c.refuse_unused(str(path), overrides, c.load(str(path), overrides))
    elif "decay_share" in own:
        with pytest.raises(ValueError, match="decay_share"):  # of the file alone it has none
            c.refuse_unused(str(path), [], c.load(str(path)))
        given = ["schedule.decay_share=0.1", *overrides]
        c.refuse_unused("", given, c.load("", given))
    else:
        c.refuse_unused(str(path), overrides, c.load(str(path), overrides))


def phases(second: str, *overrides: str) -> list[str]:
    """Overrides of a run in two halves, of which the second changes what is given."""
    return [f"phases=[{{share=0.5}},{{share=0.5{', ' * bool(second)}{second}}}]", *overrides]


NO_PAIRS, TAUGHT = "model.nsp=false", "distill.teacher=x"
CAUSAL, MIXED = ["objective.causal_share=0.4", NO_PAIRS], ["data.masking.causal_every=16", NO_PAIRS]
CAUSAL_LAST = 'data.masking.strategy="causal"'
CAUSAL_FIRST = f"phases=[{{share=0.5, {CAUSAL_LAST}}},{{share=0.5}}]"
BY_MINUTES = ["schedule.by=minutes", "schedule.budget_minutes=1.0"]
WSD = ["schedule.name=wsd", "schedule.total_steps=10", "schedule.warmup_steps=5", "schedule.decay_share=0.6"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["modle.layers=2"], "unknown config key modle; did you mean model?"),
        (["batch.lr=1"], "did you mean optimizer.lr?"),
        (["zero.offload=cpu"], "unknown config key zero.offload"),
        (["precision=fp16"], "precision: Input should be 'auto', 'bf16' or 'fp32' (got 'fp16')"),
        (["zero.stage=5"], "zero.stage: Input should be 0, 1, 2 or 3 (got 5)"),
        (["model.layers=two"], "model.layers: Input should be a valid integer (got 'two')"),
        ([f"model.layers={10**11}"], "model.layers: Input should be less than or equal to 10000 (got 100000000000)"),
        (["batch.global_size=0"], "batch.global_size: Input should be"),
        (["data.workers=100000"], "data.workers: Input should be less than or equal to 1000 (got 100000)"),
        ([f"batch.global_size={10**18}"], "batch.global_size: Input should be less than or equal to 100000000"),
        ([f"spikes.window={1 << 63}"], "spikes.window: must be below 2^63 (got 9223372036854775808)"),
        (["optimizer.lr=inf"], "optimizer.lr: Input should be a finite number (got inf)"),
        (["model.init_std=nan"], "model.init_std: Input should be a finite number (got nan)"),
        (["model.heads=7"], "model.heads=7 does not divide model.hidden=768"),
        (["model"], "write section.key=value"),
        (["data.masking.strategy=causal"], "data.masking.strategy=causal: [CLS] attends only to itself"),
        (["objective.causal_share=0.4"], "objective.causal_share above 0: [CLS] attends only to itself"),
        ([*CAUSAL, "data.masking.strategy=causal"], "objective.causal_share is for runs that end with masked LM"),
        ([*CAUSAL, TAUGHT], "distill.teacher needs one objective throughout"),
        (["data.masking.causal_every=16"], "data.masking.causal_every above 0: [CLS] attends only to itself"),
        (["data.masking.causal_every=1"], "data.masking.causal_every=1 makes every update causal"),
        ([*MIXED, TAUGHT], "data.masking.causal_every: distill.teacher needs one objective throughout"),
        (phases("data.masking.causal_every=1", NO_PAIRS), "phases.2: data.masking.causal_every=1 makes every"),
        (phases("data.masking.causal_every=2"), "[CLS] attends only to itself"),
        (["schedule.name=budget"], "schedule.name=budget needs schedule.budget_minutes"),
        (["schedule.by=minutes"], "schedule.by=minutes needs schedule.budget_minutes"),
        (["schedule.by=tokens"], "schedule.by=tokens needs schedule.budget_tokens"),
        ([*BY_MINUTES, "deterministic=true"], "by=minutes depends on the clock"),
        (WSD, "schedule.decay_share=0.6 and a warm-up of 0.5 of the budget exceed it"),
        (["data.seq_len=1024"], "data.seq_len=1024 is above model.max_positions=512; raise that"),
        (["schedule.total_steps=50"], "schedule.warmup_steps=10000 exceeds schedule.total_steps=50; lower it"),
        (["checkpoint.mirror=/mnt/runs"], "checkpoint.mirror=/mnt/runs is not a URL; give one, such as s3://BUCKET/RUN"),
        (["checkpoint.mirror=hf://me/run"], "checkpoint.mirror=hf://me/run is a repository of the hub"),
        (["checkpoint.mirror=s3://runs/a[1]"], "checkpoint.mirror=s3://runs/a[1] has a wildcard (*, ? or [)"),
        (["eval.patience=2", "eval.interval=0"], "eval.patience=2 counts evaluations; set eval.interval above 0"),
        (["phases=3"], "phases: Input should be a valid list (got 3)"),
        (["phases.1.share=1"], "override 'phases.1.share=1': there are 0 phases"),
        (["phases=3", "phases.1.share=1"], "phases=3: must be a list of tables"),
        (["phases=[{}]"], "phases.1.share: give a number above 0, its share of the run's budget (got None)"),
        (["phases=[{share=1},{share=\"x\"}]"], "phases.2.share: give a number above 0"),
        (["phases=[{share=1.0},{share=0.5}]"], "phases: their shares sum to 1.5; make it 1, or the run's budget, "),
        (phases('optimizer.name="lamb"'), "phases.2.optimizer.name: stays the same during a run; a phase changes "),
        (phases("data.masking.rat=0.2"), "key phases.2.data.masking.rat; did you mean data.masking.rate?"),
        (phases('batch.global_size="x"'), "phases.2.batch.global_size: Input should be a valid integer (got 'x')"),
        (phases("data.masking.mask=0.95"), "phases.2: data.masking.mask + data.masking.random exceed 1"),
        (phases("model.rope_theta=1e5"), "phases.2: rotary positions need model.kind=modern"),
        (phases('schedule.name="budget"'), "phases.2: schedule.name=budget needs schedule.budget_minutes"),
        (phases('schedule={name="wsd", budget_warmup=0.9}'), "phases.2: schedule.budget_warmup + schedule.decay_share"),
        (phases("", *CAUSAL), "objective.causal_share is a phase: set it to 0"),
        (phases(CAUSAL_LAST, NO_PAIRS), "phases.2: data.masking.strategy=causal, but the run's own"),
        (phases(CAUSAL_LAST), "data.masking.strategy=causal: [CLS] attends only to itself"),
        ([CAUSAL_FIRST, NO_PAIRS, TAUGHT], "phases.1: distill.teacher needs one objective throughout"),
    ],
)  # fmt: skip
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        c.load("", overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_warm_up_steps_bind_only_schedules_in_steps() -> None:
    for by in (BY_MINUTES, ["schedule.by=tokens", "schedule.budget_tokens=10"]):
        assert c.load("", ["schedule.total_steps=50", *by]).schedule.total_steps == 50


def test_a_file_in_another_encoding_is_named(tmp_path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_bytes("[model]  # für Köln".encode("latin-1"))
    with pytest.raises(ValueError, match=r"bad\.toml: is not UTF-8 \(byte 12\)"):
        c.load(str(bad))
    bad.write_text("seed = 5", encoding="utf-8-sig")  # as some editors save UTF-8
    assert c.load(str(bad)).seed == 5


def test_overrides_win_over_the_file(tmp_path) -> None:
    path = tmp_path / "own.toml"
    model = "layers = 3\nhidden = 64\nheads = 4\nnsp = false"
    path.write_text(f"seed = 7\n[model]\n{model}\n[data.masking]\nrate = 0.4\nstrategy = 'causal'\n")
    config = c.load(str(path), ["model.layers=5", "data.path=some/where", "precision=fp32"])
    assert (config.seed, config.model.layers, config.model.hidden) == (7, 5, 64)
    assert (config.data.path, config.precision) == ("some/where", "fp32")
    masking = config.data.masking
    assert (masking.rate, masking.strategy, masking.mask) == (0.4, "causal", 0.8)
    assert config.digest() != c.load(str(path)).digest() == c.load(str(path)).digest()


def test_micro_batches_share_any_number_of_ranks() -> None:
    config = c.load("", ["batch.global_size=96", "batch.micro_size=8"])
    assert [c.accumulation(config, ranks) for ranks in (1, 4, 5, 12, 100)] == [12, 3, 3, 1, 1]
    large = c.load("large_phase1", ["batch.micro_size=64"])
    assert c.accumulation(large, 24) == 43 and c.fit_micro_size(large, 24) == large
    config = c.load("", ["batch.global_size=96", "batch.micro_size=64", "precision=bf16"])
    sizes = [c.fit_micro_size(config, world).batch.micro_size for world in (1, 2, 5, 6, 100)]
    assert sizes == [48, 48, 20, 16, 1]
    padded = c.to_deepspeed(c.fit_micro_size(config, 5), 5)
    assert (padded["train_batch_size"], padded["gradient_accumulation_steps"]) == (100, 1)


def test_deepspeed_snapshot() -> None:
    sizes = ["batch.global_size=64", "batch.micro_size=8"]
    config = c.load("", [*sizes, "zero.stage=2", "precision=bf16"])
    assert c.to_deepspeed(config, 2) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "round_robin_gradients": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


def test_a_users_deepspeed_file_only_adds_keys() -> None:
    ours = c.to_deepspeed(c.load("", ["zero.stage=2", "precision=bf16"]), 1)
    no_offload = {"device": "none"}  # as it is without the key
    user = {"zero_optimization": {"reduce_bucket_size": 5, "offload_optimizer": no_offload}, "gradient_clipping": 1.0}
    merged = c.merge_deepspeed(ours, user, "f")
    assert merged["zero_optimization"]["reduce_bucket_size"] == 5 and merged["zero_optimization"]["stage"] == 2
    assert c.merge_deepspeed(ours, {"fp16": {"enabled": "auto"}}, "f") == ours
    for user, message in (
        (
            {"zero_optimization": {"stage": 3}},
            r"f\.json: zero_optimization\.stage=3 contradicts the run's 2; remove it and set zero\.stage",
        ),
        ({"steps_per_print": 100}, r"f\.json: steps_per_print=100 contradicts .*set log\.interval"),
        ({"fp16": {"enabled": True}}, r"f\.json: fp16\.enabled=True contradicts the run's False"),
        ({"optimizer": {"type": "AdamW"}}, r"f\.json: optimizer is not for this file; .* set optimizer\.\*"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, r"offload_optimizer is not for .*remove it"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, r"offload_param is not for .*remove it"),
        ({"zero_optimization": {"cpu_offload": True}}, r"cpu_offload is not for .*remove it"),
        ({"zero_optimization": {"stage3_module_granularity_threshold": 9}}, "_threshold is not for .*remove it"),
        ({"zero_optimization": {"zenflow": {}}}, "zenflow is not for .*remove it"),
        ({"bfloat16": {"enabled": True}}, "bfloat16 is not for this file; remove it and set precision"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast is not for this file; remove it and set precision"),
        ({"bf16": {"immediate_grad_update": True}}, r"bf16\.immediate_grad_update is not for .*remove it"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is not for .*remove it: a gradient is the mean"),
        ({"activation_checkpointing": {}}, r"activation_checkpointing is not .* set model\.activation_checkpointing"),
        ({"compile": {"deepcompile": True}}, r"compile is not for .* set ops\.layer=compiled"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency is not for .* set phases"),
        ({"managed_gradient_accumulation": False}, r"managed_gradient_accumulation is not for .*remove it"),
    ):
        with pytest.raises(ValueError, match=message):
            c.merge_deepspeed(ours, user, "f.json")


def test_a_malformed_deepspeed_file_is_named(tmp_path) -> None:
    assert c.read_deepspeed("") is None
    file = tmp_path / "d.json"
    for text, message in (("{'a': 1}", "not valid JSON"), ("[1]", "must hold one JSON object")):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"d\.json: {message}"):
            c.read_deepspeed(str(file))
    file.write_text('{"a": 1}')
    assert c.read_deepspeed(str(file)) == {"a": 1}

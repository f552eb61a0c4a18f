"""The configuration refuses what it does not know, names the field, and resolves to the DeepSpeed dict we expect."""

import pytest

from megabert import config as c
from megabert.common.arguments import presets


def test_every_preset_loads_and_divides_on_one_rank():
    names = presets()
    large = [f"large_phase{phase}{memory}" for phase in (1, 2) for memory in ("", "_141gb", "_80gb")]
    assert names == ["base", "base_modern", "large_24h", "large_modern", *large, "mini", "mini_modern", "small", "tiny"]
    for name in names:
        assert c.accumulation(c.load(name), 1) >= 1


def test_published_shapes():
    base, large = c.load("base").model, c.load("large_phase1").model
    assert (base.layers, base.hidden, base.heads, base.ffn) == (12, 768, 12, 3072)
    assert (large.layers, large.hidden, large.heads, large.ffn) == (24, 1024, 16, 4096)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle.layers=2", "unknown config key modle; did you mean model?"),
        ("model.layer=3", "unknown config key model.layer; did you mean model.layers?"),
        ("batch.lr=1", "did you mean optimizer.lr?"),
        ("zero.stage=5", "zero.stage: Input should be 0, 1, 2 or 3 (got 5)"),
        ("model.layers=two", "model.layers: Input should be a valid integer (got 'two')"),
        ("model.layers=2.0", "model.layers: Input should be a valid integer"),
        ("model.dropout=1.5", "model.dropout: Input should be less than 1"),
        ("model.heads=7", "model.heads=7 does not divide model.hidden=768"),
        ("data.masking.strategy=causal", "data.masking.strategy=causal: [CLS] sees nothing but itself"),
        ("precision=fp4", "precision: Input should be 'auto', 'bf16', 'fp16', 'fp32' or 'fp8' (got 'fp4')"),
        ("schedule.name=budget", "needs schedule.budget_minutes"),
        ("schedule.by=minutes", "schedule.by=minutes needs schedule.budget_minutes"),
        ("schedule.by=tokens", "schedule.by=tokens needs schedule.budget_tokens"),
        ("objective.causal_share=0.4", "objective.causal_share above 0: [CLS] sees nothing but itself"),
        ("model", "write section.key=value"),
        ("seed.x=1", "seed: Input should be a valid integer"),
    ],
)
def test_mistakes_are_named(override, message):
    with pytest.raises(ValueError) as error:
        c.load("", [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_left_to_right_does_not_take_attention_over_whole_sequences():
    causal = ["data.masking.strategy=causal", "model.nsp=false"]
    assert c.load("mini", causal).data.masking.causal and not c.load("mini").data.masking.causal
    with pytest.raises(ValueError, match=r"ops\.attention=varlen attends to whole sequences"):
        c.load("mini", [*causal, "ops.attention=varlen"])


LEFT_TO_RIGHT = ["objective.causal_share=0.4", "model.nsp=false"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*LEFT_TO_RIGHT, "data.masking.strategy=causal"],
            "objective.causal_share is for runs that end with masked LM",
        ),
        ([*LEFT_TO_RIGHT, "distill.teacher=x"], "distill.teacher reads in one way throughout"),
        ([*LEFT_TO_RIGHT, "ops.attention=varlen"], "which objective.causal_share above 0 must not"),
        (
            ["schedule.name=wsd", "schedule.total_steps=10", "schedule.warmup_steps=5", "schedule.decay_share=0.6"],
            "schedule.decay_share=0.6 and a warm-up of 0.5 of the budget are more than all of it",
        ),
        (
            ["schedule.by=minutes", "schedule.budget_minutes=1.0", "deterministic=true"],
            "deterministic=true: schedule.by=minutes reads the clock",
        ),
    ],
)
def test_settings_of_a_recipe_that_contradict_each_other_are_named(overrides, message):
    with pytest.raises(ValueError) as error:
        c.load("", overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.layers=2"], r"precision=fp8 keeps the first and the last layer in bf16: model\.layers=2 leaves none"),
        (["model.hidden=776", "model.heads=8"], r"precision=fp8 needs multiples of 16: model\.hidden is 776"),
        (["model.intermediate=3000"], r"precision=fp8 needs multiples of 16: model\.intermediate is 3000"),
    ],
)
def test_fp8_wants_inner_layers_and_sizes_of_16(overrides, message):
    assert c.load("base", ["precision=fp8"]).precision == "fp8"
    with pytest.raises(ValueError, match=message):
        c.load("base", ["precision=fp8", *overrides])


def test_missing_and_malformed_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"--config nope: no such preset or file; presets: base, "):
        c.load("nope")
    bad = tmp_path / "bad.toml"
    bad.write_text("[model\nlayers = 1")
    with pytest.raises(ValueError, match=r"bad\.toml: "):
        c.load(str(bad))
    bad.write_bytes("[model]  # für Köln".encode("latin-1"))
    with pytest.raises(ValueError, match=r"bad\.toml: is not UTF-8 \(byte 12\)"):
        c.load(str(bad))


def test_overrides_win_over_the_file(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("seed = 7\n[model]\nlayers = 3\nhidden = 64\nheads = 4\n")
    config = c.load(str(path), ["model.layers=5", "data.path=some/where", "precision=fp32"])
    assert (config.seed, config.model.layers, config.model.hidden) == (7, 5, 64)
    assert (config.data.path, config.precision) == ("some/where", "fp32")


def test_a_preset_may_set_the_masking(tmp_path):
    (tmp_path / "own.toml").write_text('[data.masking]\nrate = 0.4\nstrategy = "span"\n')
    masking = c.load(str(tmp_path / "own.toml")).data.masking
    assert (masking.rate, masking.strategy, masking.mask) == (0.4, "span", 0.8)


def test_accumulation_is_derived_for_any_number_of_ranks():
    config = c.load("", ["batch.global_size=96", "batch.micro_size=8"])
    assert [c.accumulation(config, ranks) for ranks in (1, 4, 5, 12, 100)] == [12, 3, 3, 1, 1]
    large = c.load("large_phase1")
    assert c.accumulation(large, 24) == 43 and c.fit_micro_size(large, 24) == large


def test_micro_size_shrinks_to_what_the_micro_steps_need():
    config = c.load("", ["batch.global_size=96", "batch.micro_size=64", "precision=bf16"])
    sizes = [c.fit_micro_size(config, world).batch.micro_size for world in (1, 2, 5, 6, 100)]
    assert sizes == [48, 48, 20, 16, 1]
    seats = c.to_deepspeed(c.fit_micro_size(config, 5), 5)
    assert (seats["train_batch_size"], seats["gradient_accumulation_steps"]) == (100, 1)


@pytest.mark.parametrize("preset", ["tiny", "mini"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_laptop_presets_run_on_a_few_ranks_as_they_are(preset, world):
    config = c.fit_micro_size(c.load(preset), world)
    assert c.accumulation(config, world) * config.batch.micro_size * world == config.batch.global_size


def test_deepspeed_snapshot():
    sizes = ["batch.global_size=64", "batch.micro_size=8"]
    config = c.load("", [*sizes, "zero.stage=2", "zero.offload=cpu", "precision=bf16"])
    assert c.to_deepspeed(config, 2) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "round_robin_gradients": False,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
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


def test_fp8_is_bf16_to_deepspeed():
    bf16, fp8 = (c.to_deepspeed(c.load("", [f"precision={name}"]), 1) for name in ("bf16", "fp8"))
    assert fp8 == bf16 and fp8["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("precision", "other"), [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "bf16")]
)
def test_a_users_deepspeed_file_does_not_change_the_precision(precision, other):
    ours = c.to_deepspeed(c.load("", [f"precision={precision}"]), 1)
    with pytest.raises(ValueError, match=rf"f\.json: {other}\.enabled=True contradicts the run's False"):
        c.merge_deepspeed(ours, {other: {"enabled": True}}, "f.json")
    for same in (False, "auto"):
        assert c.merge_deepspeed(ours, {other: {"enabled": same}}, "f.json") == ours


def test_a_users_deepspeed_file_may_add_but_not_contradict():
    ours = c.to_deepspeed(c.load("", ["zero.stage=2", "precision=bf16"]), 1)
    merged = c.merge_deepspeed(
        ours, {"zero_optimization": {"reduce_bucket_size": 5}, "gradient_clipping": 1.0}, "f.json"
    )
    assert merged["zero_optimization"]["reduce_bucket_size"] == 5
    assert merged["zero_optimization"]["stage"] == 2
    with pytest.raises(ValueError, match=r"f.json: zero_optimization.stage=3 contradicts the run's 2"):
        c.merge_deepspeed(ours, {"zero_optimization": {"stage": 3}}, "f.json")


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({"optimizer": {"type": "AdamW"}}, r"f\.json: optimizer is not for this file; .* set optimizer\.\*"),
        ({"scheduler": {"type": "WarmupLR"}}, r"f\.json: scheduler is not for this file; .* set schedule\.\*"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            r"f\.json: zero_optimization\.offload_optimizer is not for this file; .* set zero\.offload=cpu",
        ),
    ],
)
def test_what_a_users_deepspeed_file_cannot_set_is_named_with_what_does(user, said):
    with pytest.raises(ValueError, match=said):
        c.merge_deepspeed(c.to_deepspeed(c.load("", ["zero.stage=2", "precision=bf16"]), 1), user, "f.json")


def test_a_users_deepspeed_file_may_say_what_is_so_anyway():
    none = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    c.merge_deepspeed(c.to_deepspeed(c.load("", ["zero.stage=2", "precision=bf16"]), 1), none, "f.json")
    ours = c.to_deepspeed(c.load("", ["zero.offload=cpu", "precision=bf16"]), 1)
    assert c.merge_deepspeed(ours, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "") == ours


def test_a_deepspeed_file_that_is_none_is_named(tmp_path):
    assert c.read_deepspeed("") is None
    file = tmp_path / "d.json"
    for text, said in (("{'a': 1}", "is not JSON"), ("[1]", "must hold one JSON object")):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"d\.json: {said}"):
            c.read_deepspeed(str(file))
    file.write_text('{"a": 1}')
    assert c.read_deepspeed(str(file)) == {"a": 1}


@pytest.mark.parametrize(
    "by", [["schedule.budget_minutes=1.0", "schedule.by=minutes"], ["schedule.budget_tokens=10", "schedule.by=tokens"]]
)
def test_a_warm_up_in_steps_binds_a_schedule_that_counts_steps_alone(by):
    short = ["schedule.total_steps=50"]
    assert c.load("", [*short, *by]).schedule.total_steps == 50
    with pytest.raises(ValueError, match=r"schedule\.warmup_steps exceeds schedule\.total_steps"):
        c.load("", short)


def test_the_digest_changes_with_any_field():
    assert c.load("tiny").digest() == c.load("tiny").digest()
    assert c.load("tiny").digest() != c.load("tiny", ["seed=43"]).digest()

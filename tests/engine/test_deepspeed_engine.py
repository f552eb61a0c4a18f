"""Updates at every ZeRO stage, on any ranks and micro-steps: the plain losses, nothing changed by a bad one, dropout by row."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabert import ops
from megabert.distributed.ranks import World
from megabert.engine import Engine
from megabert.engine.zero_layout import START
from tests.helpers import once, tiny
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist
STAGES, STEPS = (0, 1, 2, 3), 20
BACKENDS = ("native", "fused_softmax")  # of attention, beside native ones of the rest
CASES = (("fp32", 1), ("fp32", 3), *(("bf16", stage) for stage in STAGES))


def same_updates(world: Any) -> dict[Any, Any]:
    """Results of 20 updates at every stage; on 1 rank the update takes 4 micro-steps, on 2 ranks 2."""
    found: dict[Any, Any] = {}
    for stage in STAGES:
        cfg = tiny.config(zero__stage=stage)
        engine = tiny.engine(cfg, world)
        results = [engine.train_update(tiny.update(s, cfg, world), 0.003) for s in range(STEPS)]
        found[stage] = {
            "losses": [tuple(r.losses.tolist()) for r in results],
            "norms": [float(r.grad_norm) for r in results],
            "counts": [r.counts.tolist() + r.correct.tolist() for r in results],
            "eval": engine.eval_sums(tiny.update(99, cfg, world).batches).tolist(),
        }
    return found


def two_ranks(world: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {case: skip(world, *case) for case in CASES}
    found["uneven"] = uneven_evaluation(world)
    for attention in () if ops.MISSING else BACKENDS:
        native = {"ops__attention": attention, "ops__mlm_loss": "native", "ops__layer": "native"}
        cfg = tiny.config(zero__stage=3, model__activation_checkpointing=True, **native)
        found[attention] = tiny.train(tiny.engine(cfg, world), range(STEPS // 2))
    return found


def skip(world: Any, precision: str, stage: int) -> dict[str, Any]:
    """4 updates; the same with two bad ones between, on the last rank only: infinite gradients under a finite loss, then
    an infinite loss over finite gradients."""
    cfg = tiny.config(precision=precision, zero__stage=stage)
    clean, engine = tiny.engine(cfg, world), tiny.engine(cfg, world)
    seen: list[str] = []  # types of the accumulated gradient after each micro-step
    if stage == 0:
        first = next(engine.module.parameters())
        first.register_post_accumulate_grad_hook(lambda p: seen.append(str(p.grad.dtype)))
    found: dict[str, Any] = {"straight": tiny.train(clean, range(4)), "losses": tiny.train(engine, range(2))}
    for kind in ("gradient", "loss"):
        before, bad, after = engine.consolidated_weights(), poisoned_update(engine, kind), engine.consolidated_weights()
        unchanged = all(torch.equal(before[n], after[n]) for n in before)
        found[kind] = bad.skipped, unchanged, math.isfinite(bad.grad_norm), engine.skipped_steps
        done = len(found["losses"])
        found["losses"] += tiny.train(engine, range(done, done + 1))
    weights = (engine.consolidated_weights().values(), clean.consolidated_weights().values())
    found["types"] = [
        {str(p.dtype) for p in engine.module.parameters()},
        {str(master.tensor.dtype) for master in engine.layout.masters},
        set(seen),
    ]
    found["same weights"] = all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    found["weights"] = weights_round_trip(clean, cfg)
    return found


def poisoned_update(engine: Any, kind: str) -> Any:
    def bad(module: Any, inputs: Any, output: Any) -> Any:
        if kind == "loss":
            return output._replace(mlm_loss_sum=output.mlm_loss_sum + math.inf)
        output.register_hook(lambda g: torch.full_like(g, math.inf))

    poisoned = engine.module if kind == "loss" else engine.module.mlm
    last = engine.world.rank == engine.world.size - 1
    hook = poisoned.register_forward_hook(bad if last else lambda *_: None)
    result = engine.train_update(tiny.update(50, engine.config, engine.world), 0.003)
    hook.remove()
    return result


def weights_round_trip(engine: Any, cfg: Any) -> tuple[Any, ...]:
    """Another model's weights, loaded: masters exact, the model rounded to its type, and its first loss the donor's."""
    donor = {n: p.detach().clone() for n, p in tiny.model(cfg, seed=3).named_parameters()}
    engine.restore(whole(donor), START)
    held = engine.consolidated_weights()
    loss = tiny.train(engine, range(1))[0][0]
    expected = tiny.model(cfg, seed=3).to(engine.dtype)
    batch = tiny.batch(0, range(tiny.ROWS))
    with torch.no_grad():
        plain_loss = float(expected(**batch.inputs()).mlm_loss_sum) / batch.predictions
    for wrong, message in (
        ({k: v for k, v in donor.items() if k != "mlm.bias"}, "mlm.bias"),
        (donor | {"extra": donor["mlm.bias"]}, "extra"),
        (donor | {"embeddings.position": torch.zeros(8, 32)}, r"position is \[8, 32\].*\[16, 32\].*max_positions"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.restore(whole(wrong), START)
    assert sorted(held) == (sorted(donor) if engine.world.rank == 0 else [])
    return all(torch.equal(weight, donor[n]) for n, weight in held.items()), loss, plain_loss


def whole(weights: dict[str, torch.Tensor]) -> Any:
    """Whole weights, as a checkpoint gives them."""
    parts = [(name, weight.view(-1)) for name, weight in weights.items()]
    shapes = {name: weight.shape for name, weight in weights.items()}
    return SimpleNamespace(shapes=shapes, gather_all=lambda kind: ((kind, *part) for part in parts))


def uneven_evaluation(world: Any) -> list[float]:
    """Rank 0 evaluates 3 micro-batches, rank 1 one; then rank 1 none, which stage 3 cannot do."""
    cfg = tiny.config(zero__stage=3)
    engine = tiny.engine(cfg, world)
    rows = [range(0, 2), range(2, 4), range(4, 6)] if world.rank == 0 else [range(6, 8)]
    sums = engine.eval_sums([tiny.batch(0, r) for r in rows]).tolist()
    with pytest.raises(ValueError, match=r"zero\.stage=3"):
        engine.eval_sums([tiny.batch(0, range(2))] if world.rank == 0 else [])
    return sums


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict[Any, Any]]:
    return once.value(tmp_path_factory, "engine-two", lambda: run_ranks(2, two_ranks, timeout=240))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The same 20 updates by a loop over whole updates with torch's own AdamW and clipping, no DeepSpeed."""
    model = tiny.model(tiny.config())
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == (decay > 0)], "weight_decay": decay}
        for decay in (0.01, 0.0)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.003, eps=1e-6, foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(tiny.backward(model, step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    batch = tiny.batch(99, range(tiny.ROWS))
    with torch.no_grad():
        out = model(**batch.inputs())
    sums = [out.mlm_loss_sum, out.mlm_correct, batch.predictions, out.nsp_loss_sum, out.nsp_correct, batch.nsp_pairs]
    return {"losses": losses, "norms": norms, "eval": [float(v) for v in sums]}


def close(found: list[tuple[float, float]], expected: list[tuple[float, float]], share: float, case: Any = "") -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=share), case


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (1, 2))
def test_20_updates_have_the_plain_losses(ranks, plain):
    found = run_ranks(ranks, same_updates, timeout=240)
    for stage in STAGES:
        of_stage = found[0][stage]
        assert all(other[stage] == of_stage for other in found)  # every rank reports the same update
        close(of_stage["losses"], plain["losses"], 1e-5, stage)
        assert of_stage["norms"] == pytest.approx(plain["norms"], rel=1e-4)
        assert of_stage["eval"] == pytest.approx(plain["eval"], rel=1e-4)
        for step, counts in enumerate(of_stage["counts"]):
            batch = tiny.batch(step, range(tiny.ROWS))
            assert counts[:2] == [batch.predictions, batch.nsp_pairs]
            assert 0 <= counts[2] <= counts[0] and 0 <= counts[3] <= counts[1]
    assert plain["losses"][-1][0] < plain["losses"][0][0] - 0.5  # it learns


@pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
@pytest.mark.parametrize("attention", BACKENDS)
def test_native_operations_under_stage_3_recompute(attention, two, plain):
    close(two[0][attention], plain["losses"][: STEPS // 2], 2e-5)


@pytest.mark.parametrize(("precision", "stage"), CASES)
def test_precisions_bad_numbers_and_loaded_weights(precision, stage, two, plain):
    """4 updates of bf16 within 0.5%: it carries 8 bits, masters and accumulation are fp32. Bad numbers of one rank skip the
    update on all. Weights can be set, and read whole."""
    runs = [found[precision, stage] for found in two]
    close(runs[0]["straight"], plain["losses"][:4], 1e-5 if precision == "fp32" else 5e-3)
    fp32 = {"torch.float32"}
    model = fp32 if precision == "fp32" else {"torch.bfloat16"}
    assert runs[0]["types"] == [model, fp32, fp32 if stage == 0 else set()]
    for run in runs:
        assert run["gradient"] == (True, True, False, 1) and run["loss"] == (True, True, False, 2)
        # moments, accumulators and masters hold no trace of them: bit-equal from there on
        assert run["losses"] == run["straight"] and run["same weights"]
        exact, loss, expected = run["weights"]
        assert exact and loss == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 2e-3)


def test_uneven_evaluation_counts_each_batch_once(two):
    batch, sums = tiny.batch(0, range(8)), two[0]["uneven"]
    with torch.no_grad():
        loss = float(tiny.model(tiny.config()).eval()(**batch.inputs()).mlm_loss_sum)
    assert sums[0] == pytest.approx(loss, rel=1e-5) and (sums[2], sums[5]) == (batch.predictions, batch.nsp_pairs)


DROPOUT = {"model__dropout": 0.1, "model__attention_dropout": 0.1}
# By name: configuration, and the ZeRO stages of three ranks.
SETUPS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "torch": (DROPOUT, (0, 1, 2, 3)),
    "recipe": ({"model__tied": False, "model__zero_init": True}, (0, 1, 2, 3)),
}
if not ops.MISSING:
    SETUPS["native"] = (DROPOUT | {"ops__attention": "native", "ops__layer": "native"}, (1,))


def losses_of_setups(world: Any) -> dict[str, list[tuple[float, float]]]:
    return {
        f"{name} {stage}": tiny.train(tiny.engine(tiny.config(zero__stage=stage, **settings), world), range(6))
        for name, (settings, stages) in SETUPS.items()
        for stage in (stages if world.size == 3 else (1,))
    }


@pytest.mark.slow
def test_losses_do_not_depend_on_ranks_or_stage() -> None:
    one = run_ranks(1, losses_of_setups)[0]
    for ranks in (2, 3, 4):  # 8 rows on 3 ranks, 2 a micro-step: the last one of one rank has none
        for name, found in run_ranks(ranks, losses_of_setups)[0].items():
            close(found, one[f"{name.split()[0]} 1"], 1e-5, (ranks, name))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"sparse_gradients": True}, "refuses it .*Sparse"),
        ({"zero_optimization": {"nonsense": 3}}, "refuses it .*nonsense: Extra inputs are not permitted"),
        ({"flops_profiler": 3}, "refuses it .*'int' object"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "refuses it .*grad_accum_dtype=torch.bfloat16"),
        (
            {"dump_state": False, "prescale_gradient": True},
            r"has no prescale_gradient; did you mean prescale_gradients\?",
        ),
    ],
)
def test_what_deepspeed_refuses_is_one_line(extra: dict[str, Any], said: str, world: World) -> None:
    cfg = tiny.config(zero__stage=0)
    with pytest.raises(ValueError, match=f"^--deepspeed_config: DeepSpeed {said}") as caught:
        Engine(cfg, tiny.model(cfg), world, extra)
    assert "\n" not in str(caught.value)

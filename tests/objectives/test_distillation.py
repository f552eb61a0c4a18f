"""A student's losses are the published ones, its teacher never changes, and it trains as any other model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabert import config as configuration
from megabert import hf as pretrained
from megabert.checkpoint import Checkpoints
from megabert.config import CheckpointConfig, Config, ModelConfig
from megabert.distributed.ranks import World
from megabert.engine import Engine
from megabert.metrics import update_metrics
from megabert.model import BertForPreTraining
from megabert.objectives import distillation
from tests.helpers import runs, tiny
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
WEIGHTS = {"distill__soft": 5.0, "distill__mlm": 2.0, "distill__cosine": 1.0, "distill__temperature": 2.0}


def teacher_run(folder: Path, **fields: Any) -> Path:
    """A run of 4 layers whose ids hold those of tiny's batches."""
    return runs.make(folder, **({"layers": 4, "max_positions": tiny.LENGTH} | fields))


def config(teacher: Path, **overrides: Any) -> Config:
    size = pretrained.load(teacher).tokenizer.vocab_size
    shape = {"model__vocab_size": size, "distill__teacher": str(teacher)}
    return tiny.config(**(shape | WEIGHTS | overrides))


def student(cfg: Config) -> distillation.Student:
    return distillation.build(cfg, pretrained.load(cfg.distill.teacher).tokenizer.sha256, CPU)


def labelled(positions: Tensor, labels: Tensor) -> list[tuple[int, int]]:
    places = zip(positions.flatten().tolist(), labels.flatten().tolist(), strict=True)
    return [(at, label) for at, label in places if label >= 0]


def oracle(cfg: Config, ours: BertForPreTraining, theirs: BertForPreTraining, batch: tiny.Batch) -> list[Tensor]:
    """The loss sums (mlm, nsp, soft, cosine), position by position as the paper writes them."""
    inputs = {name: batch.inputs()[name] for name in distillation.ENCODED}
    hidden, wanted = ours.encode(**inputs).flatten(0, 1), theirs.encode(**inputs).flatten(0, 1).detach()
    mlm, soft, cosine, nsp = (hidden.new_zeros(()) for _ in range(4))
    t = cfg.distill.temperature
    for at, label in labelled(batch.mlm_positions, batch.mlm_labels):
        z, w = ours.mlm_logits(hidden[at : at + 1])[0], theirs.mlm_logits(wanted[at : at + 1])[0].detach()
        mlm = mlm - z.softmax(-1)[label].log()
        p, q = (w / t).softmax(-1), (z / t).softmax(-1)
        soft = soft + t**2 * (p * (p / q).log()).sum()
    for at in batch.key_end.flatten().nonzero().flatten().tolist():
        a, b = hidden[at], wanted[at]
        cosine = cosine + 1 - (a * b).sum() / (a.norm() * b.norm())
    for at, label in labelled(batch.cls_positions, batch.nsp_labels):
        nsp = nsp - ours.nsp_logits(hidden[at : at + 1])[0].softmax(-1)[label].log()
    return [mlm, nsp, soft, cosine]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_losses_and_gradients_are_the_oracles(norm: str, tmp_path: Path) -> None:
    cfg = config(teacher_run(tmp_path, norm=norm), model__norm=norm, distill__temperature=3.0)
    built, batch = student(cfg).train(), tiny.batch(0, range(4))
    batch.key_start[3, 10:] = batch.key_end[3, 10:] = 0  # padding
    found = pretrained.load(tmp_path)
    theirs = runs.model(found.config.model)
    theirs.load_state_dict(found.weights)
    ours = BertForPreTraining(cfg.model, cfg.ops, "cpu", torch.float32)
    ours.load_state_dict(built.state_dict())
    output, want = built(**batch.inputs()), torch.stack(oracle(cfg, ours, theirs, batch))
    losses = torch.stack(output[:4])
    torch.testing.assert_close(losses, want, rtol=2e-5, atol=0)
    losses.sum().backward()
    want.sum().backward()
    exact = dict(ours.named_parameters())
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None and exact[name].grad is not None, name
        assert torch.allclose(parameter.grad, exact[name].grad, rtol=1e-3, atol=1e-4), name
    assert all(p.grad is None for p in built.teacher.parameters())
    assert built.teacher.state_dict().keys() == found.weights.keys()
    agreed, similar = float(output[6]), float(output[7])
    assert 0 <= agreed <= batch.predictions and similar == pytest.approx(58 - float(want[3].detach()), rel=1e-4)


def test_it_begins_in_its_teacher_and_evaluates_alone(tmp_path: Path) -> None:
    found, cfg = pretrained.load(teacher_run(tmp_path)), config(tmp_path)
    built, batch = student(cfg).eval(), tiny.batch(2, range(4))
    plain = BertForPreTraining(cfg.model, cfg.ops, "cpu", torch.float32).eval()
    assert built.state_dict().keys() == plain.state_dict().keys()
    assert len(list(built.parameters())) == len(list(plain.parameters()))
    for name, tensor in built.state_dict().items():
        assert tensor.equal(found.weights[name.replace("layers.1.", "layers.3.")]), name
    assert built.terms == ("mlm", "nsp", "soft", "cosine") and built.weights == (2.0, 1.0, 5.0, 1.0)
    assert built.provenance == {"teacher": pretrained.fingerprint(found.weights)}
    found.weights["nsp.bias"][0] += 1
    assert built.provenance != {"teacher": pretrained.fingerprint(found.weights)}
    plain.load_state_dict(built.state_dict())
    output, want = built(**batch.inputs()), plain(**batch.inputs())
    assert output[:2] == want[:2] and output[4:6] == want[2:]
    assert [float(output[i]) for i in (2, 3, 6, 7)] == [0, 0, 0, 0]


def test_a_filler_row_counts_for_nothing(tmp_path: Path) -> None:
    built = student(config(teacher_run(tmp_path))).train()
    alone, both = tiny.batch(0, [5]), tiny.batch(0, [5, 6])
    both.mlm_labels[1], both.nsp_labels[1], both.mlm_positions[1] = -100, -100, tiny.LENGTH
    one, two = (torch.stack([x.double() for x in built(**b.inputs())]) for b in (alone, both))
    assert torch.allclose(one, two, rtol=1e-6)
    assert built.counts(both)[3] == built.counts(alone)[3] == tiny.LENGTH


def test_layers_are_the_published_choice() -> None:
    for layers, taken in ((12, [0, 2, 4, 7, 9, 11]), (4, [0, 3]), (4, [0, 1, 2, 3]), (3, [0])):
        assert distillation.layers_taken(layers, ModelConfig(layers=len(taken))) == taken
    local = {"kind": "modern", "norm": "pre", "nsp": False, "window": 128, "global_every": 3}
    assert distillation.layers_taken(22, ModelConfig(layers=6, **local)) == [0, 4, 8, 12, 17, 20]


def test_norms_of_a_pre_norm_student_are_those_of_its_layers() -> None:
    """A norm is named after the block before it."""
    parts = ("attention.qkv.weight", "feed_forward_output.norm_weight")
    weights = {f"layers.{i}.{part}": torch.tensor(i) for i in range(4) for part in parts}
    found = distillation.first_weights(weights, 4, ModelConfig(layers=2, norm="pre"))
    assert {name: int(tensor) for name, tensor in found.items()} == {
        "layers.0.attention.qkv.weight": 0, "layers.0.feed_forward_output.norm_weight": 2,
        "layers.1.attention.qkv.weight": 3, "layers.1.feed_forward_output.norm_weight": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("fields", "overrides", "message"), [
    ({"hidden": 64}, {}, "model.hidden=32 but the teacher's is 64"),
    ({"intermediate": 64}, {}, "model.intermediate=128 but the teacher's is 64"),
    ({"max_positions": 40}, {}, "model.max_positions=16 but the teacher's is 40"),
    ({"segments": 1}, {}, "model.segments=2 but the teacher's is 1"),
    ({}, {"model__layers": 5}, "model.layers=5 but distill.teacher has 4"),
    ({"nsp": False}, {}, "distill.teacher has no next-sentence head; set model.nsp=false"),
    ({"causal": True}, {"model__nsp": False}, "strategy=token but distill.teacher was trained with causal"),
])  # fmt: skip
def test_what_cannot_be_a_pair_is_named(fields: Any, overrides: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")) as caught:
        student(config(teacher_run(tmp_path, **fields), **overrides))
    assert "\n" not in str(caught.value)


def test_a_students_configuration_is_its_teachers(tmp_path: Path) -> None:
    dropped = {"objective__causal_share": 0.3, "data__masking__causal_every": 4, "data__path": "old"}
    shape = {"model__layers": 4, "model__nsp": False}
    of_its_run = {"init_from": "older", "checkpoint__mirror": "s3://runs/teacher"}
    teacher = tiny.config(**shape, **dropped, **of_its_run, optimizer__lr=0.002)
    found = configuration.load("", distillation.student_overrides(teacher, "/runs/teacher", 2))
    assert found.model == configuration.replace(teacher.model, "layers", 2)
    assert found.distill.teacher == "/runs/teacher" and not found.data.path and not found.init_from
    assert not found.checkpoint.mirror
    # which a teacher cannot be combined with
    assert not found.objective.causal_share and not found.data.masking.causal_every
    assert found.optimizer == teacher.optimizer and found.batch == teacher.batch and found.ops == teacher.ops
    mixed = configuration.load("tiny", ['data.mix={"data/books"=0.3}'])
    assert not configuration.load("", distillation.student_overrides(mixed, "/runs/teacher", 1)).data.mix
    with pytest.raises(ValueError, match="--layers 5: the teacher has 4"):
        distillation.student_overrides(teacher, "/runs/teacher", 5)


def test_weights_scale_the_update_not_the_figures(world: World, tmp_path: Path) -> None:
    """One update under several weights of the losses, from the same weights of the model."""
    teacher, found = teacher_run(tmp_path), []
    for mlm, soft, cosine in ((1.0, 0.0, 0.0), (2.0, 0.0, 0.0), (0.0, 0.0, 0.0), (2.0, 5.0, 1.0)):
        weights = {"distill__mlm": mlm, "distill__soft": soft, "distill__cosine": cosine}
        cfg = config(teacher, model__nsp=False, optimizer__clip=1e9, **weights)
        result = Engine(cfg, lambda cfg=cfg: student(cfg), world).train_update(tiny.update(0, cfg, world), 0.003)
        values = update_metrics(result, ("mlm", "", "soft", "cosine"))
        found.append(values | {"host": float(result.host_loss)})
    one, two, none, all_three = found
    for values in (two, none, all_three):
        for name in ("mlm", "soft", "cosine"):
            assert values[f"train/{name}_loss"] == pytest.approx(one[f"train/{name}_loss"], rel=1e-6)
            assert values[f"train/{name}_loss"] > 0
    assert one["train/grad_norm"] > 0
    assert two["train/grad_norm"] == pytest.approx(2 * one["train/grad_norm"], rel=1e-5)
    assert none["train/grad_norm"] == none["train/loss"] == 0 and one["train/loss"] == one["train/mlm_loss"]
    want = sum(w * all_three[f"train/{name}_loss"] for name, w in (("mlm", 2), ("soft", 5), ("cosine", 1)))
    assert all_three["train/loss"] == pytest.approx(want, rel=1e-6)
    assert all_three["host"] == pytest.approx(want, rel=1e-6)


def fingerprint(engine: Engine) -> str:
    return pretrained.fingerprint(engine.module.teacher.state_dict())  # type: ignore[operator, union-attr]


def trained(world: World, teacher: str, folder: str) -> dict[str, Any]:
    """Losses of 4 updates at every ZeRO stage, what they leave, and at stage 2 a stop, a resume and the tail."""
    found: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        cfg = config(Path(teacher), zero__stage=stage, model__dropout=0.1 if stage == 2 else 0.0)
        engine = Engine(cfg, lambda cfg=cfg: student(cfg), world)
        teacher_before = fingerprint(engine)
        results = [engine.train_update(tiny.update(s, cfg, world), 0.003) for s in range(2)]
        if stage == 2:
            saving = Checkpoints(Path(folder), world, CheckpointConfig(asynchronous=False))
            saving.save(engine, {"step": 2, "config": cfg.model_dump(), "dataset": "d", "tokenizer": "t"})
        tail = [engine.train_update(tiny.update(s, cfg, world), 0.003) for s in range(2, 4)]
        if stage == 2:
            again = Engine(cfg, lambda cfg=cfg: student(cfg), world)
            saving.load(again, saving.latest())
            resumed = [again.train_update(tiny.update(s, cfg, world), 0.003).losses for s in range(2, 4)]
            found["resumed"] = all(r.losses.equal(x) for r, x in zip(tail, resumed, strict=True))
        found[f"{stage}"] = [r.losses.tolist() for r in results + tail]
        found[f"{stage} counts"] = [r.counts.tolist() for r in results + tail]
        found[f"{stage} eval"] = engine.eval_sums(tiny.update(9, cfg, world).batches).tolist()
        found[f"{stage} names"] = sorted(engine.consolidated_weights())
        found[f"{stage} teacher"] = fingerprint(engine) == teacher_before
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_updates_are_equal_on_any_ranks_and_resume(tmp_path: Path) -> None:
    teacher = teacher_run(tmp_path / "teacher")
    (alone,) = run_ranks(1, trained, str(teacher), str(tmp_path / "one"))
    two = run_ranks(2, trained, str(teacher), str(tmp_path / "two"))
    names = sorted(BertForPreTraining(config(teacher).model, config(teacher).ops).state_dict())
    assert alone["resumed"] and all(found["resumed"] for found in two)
    for stage in "0123":
        assert alone[f"{stage} names"] == two[0][f"{stage} names"] == names
        assert all(found[f"{stage} teacher"] for found in (alone, *two))
        assert two[0][stage] == two[1][stage]
        if stage == "2":
            continue  # with dropout, whose masks are a rank's
        for a, b, first in zip(alone[stage], two[0][stage], alone["0"], strict=True):
            assert a == pytest.approx(b, rel=1e-5) and a == pytest.approx(first, rel=1e-5)
        assert alone[f"{stage} counts"] == two[0][f"{stage} counts"]
        assert alone[f"{stage} eval"] == pytest.approx(two[0][f"{stage} eval"], rel=1e-4)


def test_the_tokenizer_must_be_the_datasets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its tokenizer is not the dataset's"):
        distillation.build(config(teacher_run(tmp_path)), "0" * 64, torch.device("cpu"))

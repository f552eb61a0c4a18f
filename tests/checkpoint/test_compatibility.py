"""A run goes on only as what it was; each field that forbids it is named."""

from __future__ import annotations

import json

import pytest

from megabert.checkpoint import check_compatible
from tests.checkpoint.test_store import state
from tests.helpers import tiny


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dataset": "e" * 64}, "dataset fingerprint"),
        ({"tokenizer": "u" * 64}, "tokenizer SHA-256"),
        ({"model.layers": 3}, "model.layers"),
        ({"model.hidden": 64}, "model.hidden"),
        ({"model.norm": "pre"}, "model.norm"),
        ({"model.tied": False}, "model.tied"),
        ({"batch.global_size": 16}, "batch.global_size"),
        ({"optimizer.name": "lamb"}, "optimizer.name"),
        ({"precision": "bf16"}, "precision"),
        ({"seed": 1}, "seed"),
    ],
)
def test_a_resume_on_something_else_names_the_field(change, field):
    saved = state(1, tiny.config())
    current = json.loads(json.dumps(saved))
    (key, value), *_ = change.items()
    node = current if key in current else current["config"]
    *sections, leaf = key.split(".")
    for section in sections:
        node = node[section]
    old, node[leaf] = node[leaf], value
    with pytest.raises(ValueError, match="cannot resume") as caught:
        check_compatible(saved, current)
    assert all(text in str(caught.value) for text in (field, repr(value), repr(old)))


def test_a_left_to_right_run_is_not_gone_on_with_as_a_masked_one():
    kinds = {
        strategy: state(1, tiny.config(data__masking__strategy=strategy, model__nsp=False))
        for strategy in ("token", "word", "causal")
    }
    check_compatible(kinds["token"], kinds["word"])
    check_compatible(kinds["causal"], kinds["causal"])
    for saved, current in (("token", "causal"), ("causal", "word")):
        with pytest.raises(ValueError, match=f"data.masking.strategy is '{current}' but .* with '{saved}'"):
            check_compatible(kinds[saved], kinds[current])


def test_what_may_change_on_a_resume():
    saved = state(1, tiny.config())
    for override in ({"batch__micro_size": 4}, {"model__dropout": 0.2}, {"schedule__total_steps": 20000},
                     {"optimizer__lr": 1.0}, {"checkpoint__keep": 9}, {"model__zero_init": True},
                     {"model__frequency_bias": True}):  # fmt: skip
        check_compatible(saved, state(5, tiny.config(**override)))


def test_a_checkpoint_from_before_a_field_of_the_model_is_what_it_always_was():
    saved = json.loads(json.dumps(state(1, tiny.config())))
    for field in ("tied", "zero_init", "frequency_bias"):
        del saved["config"]["model"][field]
    check_compatible(saved, state(5, tiny.config()))
    saved["config"]["model"]["activation"] = "gelu"  # as checkpoints had it for a while
    check_compatible(saved, state(5, tiny.config()))
    other = json.loads(json.dumps(saved))
    other["config"]["model"]["activation"] = "relu2"
    with pytest.raises(ValueError, match=r"model.activation is 'gelu' but the checkpoint was made with 'relu2'"):
        check_compatible(other, state(5, tiny.config()))
    with pytest.raises(ValueError, match=r"model.tied is False but the checkpoint was made with True"):
        check_compatible(saved, state(5, tiny.config(model__tied=False)))

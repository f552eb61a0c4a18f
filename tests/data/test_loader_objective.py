"""Updates whose masking depends on when they are taken, under workers that are ahead."""

from __future__ import annotations

import pytest
import torch

from megabert.data.loader import Loader
from megabert.data.masking import Masking
from megabert.data.shards import Dataset
from tests.helpers.rows import make_dataset, vocabulary

SEED = 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return Dataset(make_dataset(tmp_path_factory.mktemp("objective"), 180))


KINDS = (Masking("causal"), Masking("token", 0.3, max_predictions=11), Masking("word", 0.15, max_predictions=11))


def kind_of(step):
    return KINDS[0] if step < 3 else KINDS[1] if step < 6 else KINDS[2]


def same_batches(ours, theirs):
    for mine, other in zip(ours.batches, theirs.batches, strict=True):
        assert all(torch.equal(a, other.inputs()[name]) for name, a in mine.inputs().items())
        assert (mine.predictions, mine.tokens) == (other.predictions, other.tokens)


@pytest.mark.parametrize(("start", "workers"), [(0, 0), (2, 2)])
@pytest.mark.parametrize("known", ["before", "when it is taken"])
def test_an_update_has_the_masking_of_its_time(dataset, known, workers, start):
    """Workers are several updates ahead by then, and may have had another answer."""
    options = {"global_batch": 48, "micro_batch": 8, "seed": SEED, "start_step": start}
    taken = [start]

    def masking_of(step):
        return kind_of(step if known == "before" else taken[0])

    loader = Loader(dataset, vocabulary(), masking_of=masking_of, workers=workers, prefetch=2, **options)
    plain = {kind: Loader(dataset, vocabulary(), masking=kind, **options) for kind in KINDS}
    for step in range(start, 9):
        taken[0] = step
        update, expected = next(loader), {kind: next(other) for kind, other in plain.items()}
        assert update.step == step and update.objective == ("causal" if step < 3 else "masked")
        same_batches(update, expected[kind_of(step)])
    loader.close()

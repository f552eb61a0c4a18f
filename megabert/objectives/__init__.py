"""What a run is given from outside the loop: a teacher to learn from, and minimal pairs to judge it by."""

from __future__ import annotations

from collections.abc import Callable

from megabert.config import Config
from megabert.data.pairs import read_pairs
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.ranks import World
from megabert.engine import Engine
from megabert.objectives import distillation
from megabert.objectives.minimal_pairs import PairsWhileTraining, SentenceScorer
from megabert.workload import Extras


def extras() -> Extras:
    """For `open_run`: what `distill.teacher` and `eval.pairs` need."""
    return Extras(build=distillation.build, pairs=evaluate_pairs)


def evaluate_pairs(
    config: Config, engine: Engine, tokenizer: Tokenizer, world: World
) -> Callable[[Callable[[], None]], dict[str, float]]:
    """The evaluation of the pairs of `eval.pairs`. Raises ValueError naming file and line."""
    scorer = SentenceScorer(engine.module, config, tokenizer, world.device, line=False)
    return PairsWhileTraining(read_pairs(config.eval.pairs, config.eval.pairs_each), scorer, world).evaluate

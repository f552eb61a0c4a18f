"""What a run is given from outside the loop: a teacher to learn from, and minimal pairs to judge it by. Imports torch on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megabert.config import Config
    from megabert.data.tokenizer import Tokenizer
    from megabert.distributed.ranks import World
    from megabert.engine import Engine
    from megabert.workload import Extras


def extras() -> Extras:
    """For `open_run`: what `distill.teacher` and `eval.pairs` need."""
    from megabert.objectives import distillation
    from megabert.workload import Extras

    return Extras(build=distillation.build, pairs=evaluate_pairs)


def evaluate_pairs(
    config: Config, engine: Engine, tokenizer: Tokenizer, world: World
) -> Callable[[Callable[[], None]], dict[str, float]]:
    """The evaluation of the pairs of `eval.pairs`. Raises ValueError naming file and line."""
    from megabert.objectives.minimal_pairs import PairsWhileTraining, SentenceScorer
    from megabert.objectives.pairs import read_pairs

    scorer = SentenceScorer(engine.module, config, tokenizer, world.device, line=False)
    return PairsWhileTraining(read_pairs(config.eval.pairs, config.eval.pairs_each), scorer, world).evaluate

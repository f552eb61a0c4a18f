"""Score of weights on held-out rows: masked LM at 15% under masks that never change, in bits a byte.

Whatever an entry trained on, it is scored by the project's own evaluation, 15% of the tokens masked one by one. Bits a
byte are the mean loss of a masked token over the mean bytes of a token that can be masked: a larger vocabulary predicts
fewer and longer tokens, and is not called worse for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.race.dataset import bytes_a_token
from megabert import config as configuration
from megabert import evaluation
from megabert.config import EvalConfig, MaskingConfig, OpsConfig
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.model import BertForPreTraining

HELD_OUT_ROWS = 2_048  # of a score that is kept as one; about 37,000 masked tokens
CURVE_ROWS = 512  # of a point of a curve


class Scorer:
    """Figures of any weights on the first `rows` rows of a dataset of held-out documents."""

    def __init__(self, folder: Path, rows: int, threads: int) -> None:
        self.dataset, self.rows, self.threads = Dataset(folder), rows, threads
        self.tokenizer = Tokenizer.load(self.dataset.tokenizer_path)
        self.bytes_a_token = bytes_a_token(folder)

    def score(self, weights: Mapping[str, Tensor], tree: dict[str, Any]) -> dict[str, float]:
        """`bits` a byte, `loss` in nats a masked token and `accuracy`, of the model that the configuration `tree` is of."""
        torch.set_num_threads(self.threads)
        cfg = configuration.from_dict(tree)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = BertForPreTraining(cfg.model, OpsConfig(), device.type, torch.float32)
        model.load_state_dict(dict(weights))
        data = cfg.data.model_copy(update={"masking": MaskingConfig()})
        batch = cfg.batch.model_copy(update={"micro_size": 32})
        one_mask = cfg.model_copy(update={"data": data, "batch": batch, "eval": EvalConfig(rows=self.rows)})
        batches = evaluation.fixed_batches(self.dataset, self.tokenizer, one_mask)
        found = evaluation.summary(evaluation.batch_sums(model.to(device), batches, device))
        return figures(found["eval/mlm_loss"], found["eval/mlm_accuracy"], self.bytes_a_token)


def figures(loss: float, accuracy: float, bytes_a_token: float) -> dict[str, float]:
    """The three figures of a score, from a loss in nats a token."""
    bits = loss / math.log(2) / bytes_a_token
    return {"bits": round(bits, 5), "loss": round(loss, 5), "accuracy": round(accuracy, 5)}

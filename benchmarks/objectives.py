"""Objectives beside masked LM at equal FLOPs: held-out bits a byte, BLiMP, Zorro and SST-2, several seeds.

    python benchmarks/objectives.py --seeds 3 --pairs ../shared/data/minimal_pairs --tasks ../shared/data/tasks --json FILE

One process trains the recipe `masked-128` in a plain loop with torch's Muon and AdamW, without ZeRO: an objective that wins here gets a
key of the trainer, one that loses needs none. Everything but the objective is the same, and a run ends when it has used the FLOPs of
--tokens tokens of masked LM (`megabert.metrics.training_flops`, those of a generator included).

    masked      30% of each row's tokens
    bell        a row's share is drawn from Beta(8.4, 19.6): mean 30%, standard deviation 8.5% (after arXiv 2605.13026)
    adaptive    tokens are drawn in proportion to how often their type was mispredicted lately (hard AMLM, arXiv 2510.20475)
    mixed       one of 16 rows predicts the next token (GPT-BERT, Charpentier & Samuel 2024)
    replaced    a generator of half the layers fills the masks, and the model tells which tokens were replaced (ELECTRA, Clark et al.
                2020), with gradient-disentangled embeddings (DeBERTaV3, He et al. 2021)

A replaced-token model has no bits a byte. It scores a sentence by the sum of its tokens' log-probabilities to be original.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.common import hardware
from benchmarks.race import dataset, recipes
from benchmarks.race.dataset import RaceData, Scorer
from megabert import config as configuration
from megabert.commands.export import write
from megabert.config import Config, ModelConfig
from megabert.data.batch import Batch
from megabert.data.loader import Loader
from megabert.data.masking import IGNORE, MaskingVocabulary
from megabert.data.mixture import token_counts
from megabert.data.packing import pack
from megabert.data.pairs import read_pairs
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.hf import Pretrained
from megabert.metrics import training_flops
from megabert.model import BertForPreTraining
from megabert.objectives.minimal_pairs import score_pairs, sentences_of, table_of
from megabert.optim.schedule import learning_rate

OBJECTIVES = ("masked", "bell", "adaptive", "mixed", "replaced")
RATE = 0.3
BELL = (8.4, 19.6)
# updates between new probabilities of adaptive masking, and the weight of the old ones
ADAPT_EVERY, ADAPT_OLD = 200, 0.2
# causal rows of an update of `mixed`
CAUSAL_ROWS = 1
# weight of the discriminator's loss (Clark et al. 2020), and the layers of the generator over those of the model
REPLACED_WEIGHT, GENERATOR = 50.0, 0.5
JUDGES = ("blimp", "zorro")
# options of fine-tuning, as in bench_finetune.py, for one pass over all phrases
SST2 = ("--epochs", "1", "--batch", "64", "--lr", "3e-4")
# sentences of a replaced-token model's batch
SENTENCES = 256


@dataclass(frozen=True)
class Masks:
    """Masked copy of ids: `ids` int32 [B, T]; `at` int64 [P], flat positions of the predictions; `labels` int64 [P]."""

    ids: Tensor
    at: Tensor
    labels: Tensor


class Masker:
    """Draws the masks of an objective. `weights` fp32 [V]: relative probability of each token id to be masked."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        known = MaskingVocabulary.of(tokenizer)
        self.special, self.mask_id = torch.from_numpy(known.special), tokenizer.mask_id
        self.ordinary = torch.from_numpy(known.ordinary.astype(np.int64))
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = torch.ones(tokenizer.vocab_size)

    def draw(self, ids: Tensor, rates: Tensor) -> Masks:
        """A share `rates` [B] of each row's maskable tokens, 80% [MASK], 10% a random token, 10% as they are."""
        maskable = ~self.special[ids.long()]  # (B, T)
        chance = self.weights[ids.long()].clamp_min(1e-6).log()
        gumbel = -torch.empty_like(chance).exponential_(generator=self.generator).log()
        order = torch.where(maskable, chance + gumbel, torch.tensor(-torch.inf)).argsort(1, descending=True)
        counts = (rates * maskable.sum(1)).round().long().clamp_min(1)
        chosen = torch.zeros_like(maskable).scatter_(1, order, torch.arange(ids.shape[1]) < counts[:, None])
        at = (chosen & maskable).flatten().nonzero()[:, 0]
        labels = ids.flatten()[at].long()
        action = torch.rand(len(at), generator=self.generator)
        other = self.ordinary[torch.randint(len(self.ordinary), (len(at),), generator=self.generator)]
        new = torch.where(action < 0.8, self.mask_id, torch.where(action < 0.9, other, labels))
        masked = ids.flatten().clone()
        masked[at] = new.int()
        return Masks(masked.view_as(ids), at, labels)


def unmasked(batch: Batch) -> Tensor:
    """The ids [B, T] of a masked batch as they were."""
    ids, used = batch.input_ids.flatten().clone(), batch.mlm_labels.flatten() != IGNORE
    ids[batch.mlm_positions.flatten()[used].long()] = batch.mlm_labels.flatten()[used].int()
    return ids.view_as(batch.input_ids)


def encoder_inputs(batch: Batch, ids: Tensor) -> dict[str, Any]:
    names = ("segment_ids", "position_ids", "key_start", "key_end", "lengths")
    return {"input_ids": ids, **{name: getattr(batch, name) for name in names}}


def flops(model: ModelConfig, batch: Batch, predictions: int) -> float:
    pairs = int((batch.key_end - batch.key_start).sum())
    return training_flops(model, batch.tokens, pairs, predictions, 0)


# -- objectives: the loss of an update and its FLOPs -----------------------------------------------------------------


class Objective(nn.Module):
    """`forward(batch)` is the loss of an update and its FLOPs; `model` is what the training is for."""

    model: BertForPreTraining
    masker: Masker


class MaskedLm(Objective):
    """Masked LM, also with rates by row, adaptive tokens, or causal rows."""

    def __init__(self, name: str, config: Config, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__()
        self.name, self.config = name, config
        self.model = BertForPreTraining(config.model, dtype=torch.float32, causal=name == "mixed")
        self.masker = Masker(tokenizer, seed)
        self.draws = np.random.default_rng(seed)
        self.seen, self.missed = torch.zeros(tokenizer.vocab_size), torch.zeros(tokenizer.vocab_size)
        self.updates = 0

    def forward(self, batch: Batch) -> tuple[Tensor, float]:
        rates = torch.full((len(batch.input_ids),), RATE)
        if self.name == "bell":
            rates = torch.from_numpy(self.draws.beta(*BELL, len(rates))).float()
        ids = unmasked(batch)
        masks = self.masker.draw(ids, rates)
        if self.name == "mixed":
            batch, masks = with_causal_rows(batch, ids, masks)
        hidden = self.model.encode(**encoder_inputs(batch, masks.ids), keep=masks.at, causal=self.name == "mixed")
        logits = self.model.mlm_logits(hidden)
        if self.name == "adaptive":
            self.adapt(masks.labels, logits.argmax(-1) != masks.labels)
        return F.cross_entropy(logits, masks.labels), flops(self.config.model, batch, len(masks.at))

    @torch.no_grad()
    def adapt(self, labels: Tensor, missed: Tensor) -> None:
        """Count the mispredictions of each token; every ADAPT_EVERY updates they become its probability."""
        self.updates += 1
        self.seen += torch.bincount(labels, minlength=len(self.seen))
        self.missed += torch.bincount(labels[missed], minlength=len(self.seen))
        if self.updates % ADAPT_EVERY == 0:
            new = (self.missed + 1) / (self.seen + 1)  # 1 without a prediction
            self.masker.weights = ADAPT_OLD * self.masker.weights + (1 - ADAPT_OLD) * new
            self.seen.zero_()
            self.missed.zero_()


def with_causal_rows(batch: Batch, ids: Tensor, masks: Masks) -> tuple[Batch, Masks]:
    """The first CAUSAL_ROWS rows unmasked: a token attends to itself and those before it, and predicts the next."""
    width = ids.shape[1]
    first = CAUSAL_ROWS * width
    ends = batch.key_end.clone()
    places = torch.arange(1, width + 1, dtype=ends.dtype).expand(CAUSAL_ROWS, width)
    ends[:CAUSAL_ROWS] = torch.where(ends[:CAUSAL_ROWS] > 0, places, 0)
    same = batch.key_start[:, 1:] == batch.key_start[:, :-1]
    same &= batch.key_end[:, 1:] == batch.key_end[:, :-1]
    same &= batch.key_end[:, 1:] > 0
    same[CAUSAL_ROWS:] = False
    row, place = same.nonzero(as_tuple=True)
    hidden = masks.ids.clone()
    hidden[:CAUSAL_ROWS] = ids[:CAUSAL_ROWS]
    kept = masks.at >= first
    at = torch.cat([row * width + place, masks.at[kept]])
    labels = torch.cat([ids[row, place + 1].long(), masks.labels[kept]])
    return replace(batch, key_end=ends), Masks(hidden, at, labels)


class ReplacedTokens(Objective):
    """A generator of masked tokens, and the model that tells replaced tokens from original ones.

    The model's embeddings are the generator's, through which it sends no gradient, plus a difference of its own.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__()
        self.config = config
        layers = max(1, round(config.model.layers * GENERATOR))
        self.small = config.model.model_copy(update={"layers": layers})
        self.generator = BertForPreTraining(self.small, dtype=torch.float32)
        self.model = BertForPreTraining(config.model, dtype=torch.float32)
        self.difference = nn.Parameter(torch.zeros_like(self.model.embeddings.word.weight))
        self.model.embeddings.word.weight.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(config.model.hidden, config.model.hidden), nn.GELU())
        self.decide = nn.Linear(config.model.hidden, 1)
        self.masker = Masker(tokenizer, seed)

    def table(self) -> Tensor:
        return self.generator.embeddings.word.weight.detach() + self.difference

    def forward(self, batch: Batch) -> tuple[Tensor, float]:
        ids = unmasked(batch)
        masks = self.masker.draw(ids, torch.full((len(ids),), RATE))
        logits = self.generator.mlm_logits(self.generator.encode(**encoder_inputs(batch, masks.ids), keep=masks.at))
        loss = F.cross_entropy(logits, masks.labels)
        drawn = torch.empty_like(logits).exponential_(generator=self.masker.generator).log()
        shown = ids.flatten().clone()
        shown[masks.at] = (logits.detach() - drawn).argmax(-1).int()
        shown = shown.view_as(ids)
        judged = ~self.masker.special[ids.long()]
        real = (shown == ids)[judged].float()
        loss = loss + REPLACED_WEIGHT * F.binary_cross_entropy_with_logits(self.original(batch, shown)[judged], real)
        spent = flops(self.small, batch, len(masks.at)) + flops(self.config.model, batch, 0)
        return loss, spent + 6.0 * self.config.model.hidden**2 * batch.tokens

    def original(self, batch: Any, ids: Tensor) -> Tensor:
        """Logits [B, T] of each token to be original."""
        table = {"model.embeddings.word.weight": self.table()}
        found = torch.func.functional_call(_Encoder(self.model), table, (encoder_inputs(batch, ids),))
        return self.decide(self.head(found))[..., 0]

    @torch.no_grad()
    def scores(self, sentences: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[str, float]]:
        """Each sentence with the sum of its tokens' log-probabilities to be original."""
        for first in range(0, len(sentences), SENTENCES):
            part = sentences[first : first + SENTENCES]
            encoded = [
                np.array([tokenizer.cls_id, *ids, tokenizer.sep_id], np.int32) for ids in tokenizer.encode_texts(part)
            ]
            packed = pack(encoded, [len(ids) for ids in encoded])
            likely = F.logsigmoid(self.original(packed, packed.input_ids)).flatten()
            for sentence, start, ids in zip(part, packed.starts, encoded, strict=True):
                yield sentence, float(likely[start + 1 : start + len(ids) - 1].sum())


class _Encoder(nn.Module):
    """`encode` as `forward`, which torch.func needs."""

    def __init__(self, model: BertForPreTraining) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        return self.model.encode(**inputs)


# -- training --------------------------------------------------------------------------------------------------------


def optimizers(module: nn.Module, config: Config) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, AdamW for the rest, with the recipe's values."""
    options = config.optimizer
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if ".layers." in name and p.dim() == 2]
    rest = [p for name, p in trained.items() if not (".layers." in name and p.dim() == 2)]
    decayed = [p for p in rest if p.dim() == 2]
    plain = [p for p in rest if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    muon = torch.optim.Muon(matrices, lr=options.lr, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps)]


def train(objective: str, seed: int, config: Config, data: Dataset, tokenizer: Tokenizer) -> Objective:
    """The trained objective. The schedule's tokens are those of masked LM with the FLOPs used so far."""
    torch.manual_seed(seed)
    replaced = objective == "replaced"
    module: Objective = (
        ReplacedTokens(config, tokenizer, seed) if replaced else MaskedLm(objective, config, tokenizer, seed)
    )
    module.train()
    if config.model.frequency_bias and not replaced:
        counts = token_counts(data, ~module.masker.special.numpy())
        module.model.start_from_frequencies(torch.from_numpy(counts))
    steps = optimizers(module, config)
    rows = config.batch.global_size
    loader = iter(Loader(data, tokenizer, global_batch=rows, micro_batch=rows, seed=seed))
    tokens, spent, budget = config.schedule.budget_tokens, 0.0, 0.0
    losses: list[float] = []
    bar = tqdm(total=1.0, desc=f"{objective} {seed}", disable=None, leave=False)
    while not budget or spent < budget:
        (batch,) = next(loader).batches
        if not budget:  # the FLOPs of masked LM, from the first update's rows
            budget = tokens * flops(config.model, batch, round(RATE * batch.tokens)) / batch.tokens
        lr = learning_rate(config.schedule, config.optimizer.lr, len(losses), tokens=round(tokens * spent / budget))
        for optimizer in steps:
            for group in optimizer.param_groups:
                group["lr"] = lr
        loss, used = module(batch)
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], config.optimizer.clip)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
        spent += used
        losses.append(float(loss.detach()))
        bar.update(used / budget)
    bar.close()
    print(
        f"{objective} seed {seed}: {len(losses):,} updates, loss {statistics.fmean(losses[-50:]):.3f}", file=sys.stderr
    )
    return module.eval()


def judge(module: Objective, config: Config, data: RaceData, tokenizer: Tokenizer, args: Any, folder: Path) -> Any:
    """Scores of a trained objective; its model is written to `folder` as a Hugging Face folder, which is fine-tuned."""
    found: dict[str, Any] = {}
    weights = {name: tensor.detach() for name, tensor in module.model.state_dict().items()}
    if isinstance(module, ReplacedTokens):
        weights["embeddings.word.weight"] = module.table().detach()
    else:
        tree = json.loads(config.model_dump_json())
        found["held_out"] = Scorer(data.held_out, dataset.HELD_OUT_ROWS, args.threads).score(weights, tree)
    pretrained = Pretrained(folder, weights, {"step": 0}, config, tokenizer)
    for name in JUDGES:
        pairs = read_pairs(args.pairs / name, args.each)
        if isinstance(module, ReplacedTokens):
            table = table_of(pairs, dict(module.scores(sentences_of(pairs), tokenizer)))
        else:
            table = score_pairs(pretrained, pairs)
        found[name] = {key: table[key] for key in ("accuracy", "pairs", "ties", "fields")}
    write(pretrained, folder, overwrite=True)
    tuned = folder.with_name(f"{folder.name}-sst2")
    command = [sys.executable, "-m", "megabert", "finetune", "--model", str(folder), "--task", "sst2", *SST2]
    command += ["--train", str(args.tasks / "sst2/train.tsv"), "--dev", str(args.tasks / "sst2/dev.tsv")]
    hardware.call([*command, "--output", str(tuned)], args.threads, tuned.with_suffix(".log"))
    points = json.loads((tuned / "summary.json").read_text())["points"]
    found["sst2"] = {"accuracy": points[0]["scores"]["dev"]["accuracy"]["mean"]}
    return found


# -- the command -----------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means and standard deviations over seeds, as Markdown."""
    by_objective = defaultdict(list)
    for row in rows:
        by_objective[row["objective"]].append(row)
    lines = ["| objective | seeds | bits a byte | BLiMP | Zorro | SST-2 |", "|---|" + "---|" * 5]

    def shown(values: list[float], scale: float, digits: int) -> str:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{scale * statistics.fmean(values):.{digits}f} ± {scale * spread:.{digits}f}"

    for objective, of in by_objective.items():
        bits = shown([row["held_out"]["bits"] for row in of], 1, 4) if "held_out" in of[0] else "undefined"
        cells = [shown([row[name]["accuracy"] for row in of], 100, 1) for name in (*JUDGES, "sst2")]
        lines.append(f"| `{objective}` | {len(of)} | {bits} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--objective", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    add("--seeds", type=int, default=1)
    add("--tokens", type=float, default=4e6, help="budget: the FLOPs of masked LM on so many tokens")
    add("--recipe", default="masked-128", metavar="NAME")
    add("--text", type=Path, default=dataset.default_text(), help="folder with enwiki/*/wiki_* and novels/*.txt")
    add("--pairs", type=Path, required=True, help=f"folder with {' and '.join(JUDGES)}")
    add("--each", type=int, default=100, help="pairs of a paradigm, the first ones")
    add("--tasks", type=Path, required=True, help="folder with sst2/train.tsv and sst2/dev.tsv")
    add("--run", type=Path, default=Path("runs/objectives"), help="folder of shards and models")
    add("--threads", type=int, default=1)
    hardware.add_json(parser, required=True)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    torch.set_num_threads(args.threads)
    recipe = recipes.load(args.recipe)
    data = dataset.prepare(args.run, args.text, recipe.vocabulary)
    overrides = [*recipe.overrides(), "schedule.by=tokens", f"schedule.budget_tokens={round(args.tokens)}"]
    overrides += [f"schedule.budget_warmup={recipe.warmup}", "schedule.total_steps=1000000000"]
    train_data = Dataset(data.train)
    tokenizer = Tokenizer.load(train_data.tokenizer_path)
    config = configuration.load(recipe.preset, [*overrides, f"model.vocab_size={tokenizer.vocab_size}"])
    rows = json.loads(args.json.read_text())["rows"] if args.json.is_file() else []
    for seed in range(42, 42 + args.seeds):
        for objective in args.objective:
            about = {"objective": objective, "recipe": recipe.name, "seed": seed, "tokens": args.tokens}
            if about.items() in [{key: row[key] for key in about}.items() for row in rows]:
                continue
            module = train(objective, seed, config, train_data, tokenizer)
            rows.append(about | judge(module, config, data, tokenizer, args, args.run / f"{objective}-{seed}"))
            hardware.write_json(args.json, {"rows": rows})
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Sentence vectors from a pre-trained run: exported as a sentence-transformers folder and trained by that library.

python examples/train_sentence_vectors.py runs/mini train-v1.1.json.gz runs/vectors
python examples/train_sentence_vectors.py runs/mini train-v1.1.json.gz runs/vectors 200     a short trial of 200 updates

The data is SQuAD's JSON. The vectors of a question and its paragraph are trained to be nearer to each other than those of the
question and any other paragraph of the batch (multiple negatives ranking, Henderson et al. 2017). No text is twice in a batch,
even as a question and as a paragraph, so no text is a negative of itself, nor is it in the evaluation. The paragraphs of the last
articles are held out, and nDCG and mean reciprocal rank of a search among them are printed before and after. OUTPUT/model can be
loaded by `SentenceTransformer` and by MegaBERT. Needs `pip install 'sentence-transformers[train]'`.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.training_args import BatchSamplers

from megabert.commands.export import export

MAX_LENGTH = 128
# Share of the articles.
HELD_OUT = 0.1
METRIC, RANK = "held-out_cosine_ndcg@10", "held-out_cosine_mrr@10"


class EvaluatorOfOthers(InformationRetrievalEvaluator):
    """A search that ignores the query's text in the corpus; texts are their own ids."""

    def compute_metrics(self, queries_result_list: list[Any]) -> Any:
        every = zip(self.queries_ids, queries_result_list, strict=True)
        return super().compute_metrics([[hit for hit in hits if hit["corpus_id"] != query] for query, hits in every])


def read_pairs(path: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(question, paragraph) pairs for training, and those of the held-out articles."""
    raw = path.read_bytes()
    articles = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["data"]
    train = len(articles) - max(1, round(HELD_OUT * len(articles)))
    parts = articles[:train], articles[train:]
    first, second = (
        [(q["question"], p["context"]) for a in part for p in a["paragraphs"] for q in p["qas"]] for part in parts
    )
    return first, second


def evaluator_of(pairs: list[tuple[str, str]]) -> EvaluatorOfOthers:
    """A search of all paragraphs of `pairs` by every question."""
    corpus: dict[str, Any] = {context: context for _, context in pairs}
    queries: dict[str, Any] = {question: question for question, _ in pairs}
    relevant: dict[str, set[str]] = {}
    for question, context in pairs:
        relevant.setdefault(question, set()).add(context)
    return EvaluatorOfOthers(queries, corpus, relevant, name="held-out")


def trainer_of(model: SentenceTransformer, pairs: list[tuple[str, str]], output: str, max_steps: int = -1) -> Any:
    """The library's trainer on pairs of query and positive."""
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=f"{output}/trainer", max_steps=max_steps, num_train_epochs=1, per_device_train_batch_size=64,
            learning_rate=3e-4, warmup_steps=0.1, batch_sampler=BatchSamplers.NO_DUPLICATES, save_strategy="no",
            report_to="none", seed=1,
        ),
        train_dataset=Dataset.from_dict({"anchor": [a for a, _ in pairs], "positive": [b for _, b in pairs]}),
        loss=MultipleNegativesRankingLoss(model),
    )  # fmt: skip


def main(run: str, squad: str, output: str, max_steps: int = -1) -> None:
    start = export(run, f"{output}/start", overwrite=True, pool="mean")
    model = SentenceTransformer(f"{output}/start")
    model.max_seq_length = min(MAX_LENGTH, start.config.model.max_positions)
    train, held_out = read_pairs(Path(squad))
    evaluate = evaluator_of(held_out)
    before = evaluate(model)
    trainer_of(model, train, output, max_steps).train()
    model.save(f"{output}/model")
    for name, data in start.tokenizer.files().items():  # the form that MegaBERT reads, besides tokenizer.json
        Path(output, "model", name).write_bytes(data)
    after = evaluate(model)
    for metric in (METRIC, RANK):
        print(f"{metric}: {before[metric]:.3f} before, {after[metric]:.3f} after; {len(train):,} pairs trained on")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))  # type: ignore[arg-type]

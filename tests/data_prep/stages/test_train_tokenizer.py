"""Scores of a unigram model have exact sums, so that no rounding decides between two segmentations."""

from __future__ import annotations

import pytest
from sentencepiece import sentencepiece_model_pb2

from data_prep.options import BuildOptions
from data_prep.stages.train_tokenizer import STEPS, exact, train


def pieces(model: bytes) -> list[tuple[str, int, float]]:
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    return [(piece.piece, piece.type, piece.score) for piece in proto.pieces]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_scores_are_whole_steps(model_type: str, topics: list[str]) -> None:
    model = train(topics, BuildOptions(vocab_size=300, model_type=model_type))
    scores = [score for *_, score in pieces(model)]
    assert min(scores) < -8 and all((score * STEPS).is_integer() for score in scores)


def test_rounding_changes_nothing_else() -> None:
    proto = sentencepiece_model_pb2.ModelProto()
    for piece, kind, score in [
        ("[UNK]", 2, 0.0),
        ("\u2581the", 1, -3.14159),
        ("a", 1, -2.71828),
        ("x", 1, -12.0),
    ]:
        proto.pieces.add(piece=piece, type=kind, score=score)
    proto.trainer_spec.vocab_size = 4
    proto.normalizer_spec.name = "nmt_nfkc"
    before = proto.SerializeToString()
    after = exact(before)
    assert pieces(after) == [
        ("[UNK]", 2, 0.0),
        ("\u2581the", 1, -804 / 256),
        ("a", 1, -696 / 256),
        ("x", 1, -12.0),
    ]
    again = sentencepiece_model_pb2.ModelProto.FromString(after)
    for piece, old in zip(again.pieces, proto.pieces, strict=True):
        piece.score = old.score
    assert again == proto

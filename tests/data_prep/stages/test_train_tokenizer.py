"""Scores of a unigram model have exact sums, so that no rounding decides between two segmentations."""

from pathlib import Path
from typing import Any

import pytest
from sentencepiece import sentencepiece_model_pb2

from data_prep.common.errors import BadInput
from data_prep.options import BuildOptions
from data_prep.stages.train_tokenizer import STEPS, exact, train, train_files
from megabert.data.tokenizer import Casing, Tokenizer


def entries(model: bytes) -> list[tuple[str, int, float]]:
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    return [(piece.piece, piece.type, piece.score) for piece in proto.pieces]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_scores_are_whole_steps(model_type: str, topics: list[str]) -> None:
    model = train(topics, BuildOptions(vocab_size=300, model_type=model_type))
    scores = [score for *_, score in entries(model)]
    assert min(scores) < -8 and all((score * STEPS).is_integer() for score in scores)


def test_rounding_changes_nothing_else() -> None:
    proto = sentencepiece_model_pb2.ModelProto()
    for piece, kind, score in [("[UNK]", 2, 0.0), ("\u2581the", 1, -3.14159), ("a", 1, -2.71828), ("x", 1, -12.0)]:
        proto.pieces.add(piece=piece, type=kind, score=score)
    proto.trainer_spec.vocab_size = 4
    proto.normalizer_spec.name = "nmt_nfkc"
    before = proto.SerializeToString()
    after = exact(before)
    assert entries(after) == [("[UNK]", 2, 0.0), ("\u2581the", 1, -804 / 256), ("a", 1, -696 / 256), ("x", 1, -12.0)]
    again = sentencepiece_model_pb2.ModelProto.FromString(after)
    for piece, old in zip(again.pieces, proto.pieces, strict=True):
        piece.score = old.score
    assert again == proto


def trained(lines: list[str], folder: Path, **options: Any) -> Tokenizer:
    for name, data in train_files(lines, BuildOptions(**options)).items():
        (folder / name).write_bytes(data)
    return Tokenizer.load(folder / ("vocab.txt" if options.get("model_type") == "wordpiece" else "tokenizer.model"))


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("model_type", ["unigram", "wordpiece"])
def test_rare_ascii_characters_get_a_token(model_type: str, lowercase: bool, topics: list[str], tmp_path: Path) -> None:
    lines = [*topics, "Kirkbank, Queen Victoria and Fr\u0161ulein Q7 {~}?"]
    tokenizer = trained(lines, tmp_path, vocab_size=800, model_type=model_type, lowercase=lowercase)
    known, other = tokenizer.encode_batch(["Kirkbank Queen Victoria Q7 {~}?", "Fr\u0161ulein"])
    assert tokenizer.unk_id not in known and tokenizer.unk_id in other


def test_wordpiece_vocabulary_spells_every_word(topics: list[str], tmp_path: Path) -> None:
    lines = [*topics[:9], *["Die Bücher über Élan, किताबों की दुकान"] * 20]
    options: dict[str, Any] = {"vocab_size": 800, "model_type": "wordpiece", "character_coverage": 1.0}
    tokenizer = trained(lines, tmp_path, **options)
    assert tokenizer.kind == "wordpiece" and 700 < tokenizer.vocab_size <= 800 and tokenizer.special_ids["pad"] == 0
    text = "The statement's Bücher, किताबों की"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.unk_id not in ids
    assert "".join(tokenizer.tokens[i] for i in ids).replace(" ", "") == text.replace(" ", "")
    uncased = trained(lines, tmp_path, lowercase=True, **options)
    assert uncased.casing == Casing(lowercase=True, strip_accents=False, form="NFC")
    assert uncased.encode_batch(["BÜCHER की"]) == uncased.encode_batch(["bücher की"])
    assert "".join(uncased.tokens[i] for i in uncased.encode_batch(["Bücher"])[0]) == " bücher"


def test_wordpiece_vocabulary_size_is_exact(tmp_path: Path) -> None:
    """Ideographs are words of their own: none continues with one. Syllables of Hangul do."""
    options: dict[str, Any] = {"model_type": "wordpiece", "character_coverage": 1.0}
    ideographs = ["".join(chr(0x4E00 + (i * 7 + k) % 300) for k in range(20)) for i in range(300)]
    tokenizer = trained(ideographs, tmp_path, vocab_size=400, **options)
    assert tokenizer.vocab_size == 305
    assert not any(tokenizer.unk_id in ids for ids in tokenizer.encode_batch(ideographs))
    assert trained(ideographs, tmp_path, vocab_size=605, **options).vocab_size == 605  # all fit: as ever
    syllables = ["".join(chr(0xAC00 + (i * 7 + k) % 300) for k in range(20)) for i in range(300)]
    with pytest.raises(BadInput, match="400 is too small: the corpus' characters alone need 605"):
        trained(syllables, tmp_path, vocab_size=400, **options)
    assert trained(syllables, tmp_path, vocab_size=605, **options).vocab_size == 605
    with pytest.raises(BadInput, match=r"200 is too small: the corpus' characters alone need 30\d"):
        trained(syllables, tmp_path, vocab_size=200, **options)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece"])
def test_the_least_coverage_trains_and_less_is_refused(kind: str, topics: list[str], tmp_path: Path) -> None:
    assert trained(topics, tmp_path, vocab_size=300, model_type=kind, character_coverage=0.98).vocab_size == 300
    with pytest.raises(BadInput, match=r"--character-coverage: must lie in 0\.98\.\.1, is 0\.97"):
        BuildOptions(model_type=kind, character_coverage=0.97).check()
    # 8 tokens, which --vocab-size does not take
    with pytest.raises(BadInput, match="100 is too large for this corpus; add more text"):
        trained(["a"], tmp_path, vocab_size=100, model_type=kind)

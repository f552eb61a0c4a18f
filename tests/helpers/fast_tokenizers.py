"""Small tokenizer.json files of every kind, trained by the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.runs import TEXT

ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
KINDS = ("bytes", "bytes-prefix", "unigram", "wordpiece")


def write(
    path: Path, kind: str = "bytes", special: list[str] = ROBERTA, texts: list[str] = TEXT, size: int = 400
) -> Path:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    if kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        made.normalizer = normalizers.NFKC()
        trainer = trainers.UnigramTrainer(
            vocab_size=size, special_tokens=special, unk_token=special[3], show_progress=False
        )
    elif kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token=special[3]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    else:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes-prefix")
        made.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    made.train_from_iterator(texts, trainer)
    made.save(str(path))
    return path


def name_special(path: Path, **names: str) -> None:
    """A tokenizer_config.json beside `path`."""
    path.with_name("tokenizer_config.json").write_text(json.dumps(names))

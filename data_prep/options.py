"""Options of a build: every choice that changes its bytes, checked before anything is read and listed in the manifest."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from data_prep.common.errors import BadInput
from data_prep.filters import rules
from data_prep.filters.classifiers import Classifier
from data_prep.filters.rules import Rules
from data_prep.readers.tasks import Corpus, ReadOptions
from data_prep.text.clean import Form
from megabert.data.tokenizer import Tokenizer

BLOCK_ROWS = 256
SHORTEST_SENTENCE = 8  # tokens
DEDUP = ("documents", "near", "paragraphs")
TRAINING = (
    *("vocab_size", "model_type", "lowercase", "sample_megabytes", "sample_alpha"),
    *("model_form", "character_coverage", "byte_fallback"),
)


@dataclass(frozen=True)
class CorpusOptions:
    """What each corpus may have of its own."""

    read: ReadOptions
    rules: Rules
    language: Classifier | None = None

    def folds(self) -> bool:
        """Whether a rule looks at folded words."""
        return any(getattr(self.rules, name) is not None for name in rules.FOLDED_RULES)


@dataclass(frozen=True)
class BuildOptions:
    """Options of `data_prep build` but its inputs, output and number of workers."""

    seq_lens: tuple[int, ...] = (128,)  # tokens a row; a dataset each
    max_sequences: int = 0  # packed in a row at most; 0 chooses by the corpus (shuffle.choose_slots)
    nsp: bool = True  # sentence pairs; without, full sentences
    short_share: float = 0.1  # of pairs that aim at a shorter, uniform length
    held_out: float = 0.01  # of documents, by a hash of their words
    seed: int = 0
    normalization: Form = "NFC"
    language: Classifier | None = None  # documents of other languages are dropped
    quality: Classifier | None = None  # and those that a model of the user's judges to be no good
    mask: tuple[str, ...] = ()  # what is masked in texts: text.masking.KINDS
    rules: Rules = field(default_factory=Rules)
    dedup: tuple[str, ...] = ("documents",)
    vocab_size: int = 30_000
    model_type: str = "unigram"
    model_form: Form = "NFKC"  # what a SentencePiece model that is trained does to characters itself
    character_coverage: float = 0.9995  # of the sample's characters; the rest is [UNK]
    byte_fallback: bool = False  # pieces for bytes in place of [UNK]
    keep_whitespace: bool = False  # runs of spaces, tabs and line feeds become tokens, for code
    lowercase: bool = False
    sample_megabytes: int = 20  # text the tokenizer is trained on
    sample_alpha: float = 1.0  # a corpus' share of it goes with its bytes to this power
    max_sentence: int = 0  # tokens; longer ones are split where pairs are made. 0: where much of a text is far longer
    rows_per_shard: int = 65_536
    read: ReadOptions = field(default_factory=ReadOptions)

    def check(self) -> None:
        """Raises BadInput naming the option that is out of range."""
        for seq_len in self.seq_lens:
            if not 8 <= seq_len <= 8192:
                raise BadInput(f"--seq-len: must lie in 8..8192, is {seq_len}")
        if len(set(self.seq_lens)) < len(self.seq_lens):
            raise BadInput(f"--seq-len: a length is named twice: {' '.join(map(str, self.seq_lens))}")
        for name, low, high in (
            ("max_sequences", 0, 64),
            ("short_share", 0, 1),
            ("held_out", 0, 0.5),
            ("seed", 0, 2**32 - 1),
            ("vocab_size", 16, 1_000_000),
            ("sample_megabytes", 1, 200),
            ("sample_alpha", 0, 1),
            ("character_coverage", 0.9, 1),
            ("max_sentence", 0, 8192),
            ("rows_per_shard", BLOCK_ROWS, 1 << 24),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadInput(f"--{name.replace('_', '-')}: must lie in {low}..{high}, is {value}")
        if 0 < self.max_sentence < SHORTEST_SENTENCE:
            raise BadInput(f"--max-sentence: must be 0 or at least {SHORTEST_SENTENCE}, is {self.max_sentence}")
        if self.rows_per_shard % BLOCK_ROWS:
            raise BadInput(f"--rows-per-shard: must be a multiple of {BLOCK_ROWS}, is {self.rows_per_shard}")

        if self.lowercase and self.model_form != "NFKC" and self.kind == "sentencepiece":
            raise BadInput(
                f"--normalization {self.model_form}: --lowercase folds case together with NFKC; leave one of them out, or take "
                "--model-type wordpiece"
            )
        if self.byte_fallback and self.kind == "wordpiece":
            raise BadInput("--byte-fallback: is SentencePiece's; WordPiece has none")

        if self.keep_whitespace and self.kind == "wordpiece":
            raise BadInput("--keep-whitespace: WordPiece forgets whitespace; take --model-type unigram or bpe")
        if self.keep_whitespace and {self.normalization, self.model_form} != {"none"}:
            raise BadInput("--keep-whitespace: takes --normalization none, which changes no character")

    def check_tokenizer(self, given: Tokenizer) -> None:
        """Raises BadInput where a tokenizer does with whitespace other than these options say."""
        if given.keeps_whitespace == self.keep_whitespace:
            return
        if self.keep_whitespace:
            why = "is WordPiece, which forgets" if given.kind == "wordpiece" else "was not trained to keep"
            raise BadInput(f"--keep-whitespace: {given.path} {why} whitespace; leave one of the two out")
        raise BadInput(f"--tokenizer {given.path}: keeps whitespace; give --keep-whitespace --normalization none")

    @property
    def kind(self) -> str:
        """Of the tokenizer that is trained, as `Tokenizer.kind` says it."""
        return "wordpiece" if self.model_type == "wordpiece" else "sentencepiece"

    def shared(self) -> CorpusOptions:
        """Those of a corpus that has none of its own."""
        return CorpusOptions(self.read, self.rules, self.language)

    def of(self, corpus: Corpus) -> CorpusOptions:
        """Options of a corpus: its own where it has some. Raises BadInput for a filter that is none."""
        own = self.rules if corpus.filters is None else rules.parse(list(corpus.filters))
        language = self.language
        if corpus.languages is not None:
            if language is None:
                raise BadInput(f"corpus {corpus.name}: a language takes --language-model")
            language = replace(language, labels=corpus.languages)
        return CorpusOptions(corpus.read or self.read, own, language)

    def listed(self, trained: bool) -> dict[str, Any]:
        """As manifests and accounts list them, equal to what is read back; a reused tokenizer makes the options of its training void."""
        listed = asdict(self)
        if not trained:
            for name in TRAINING:
                listed.pop(name, None)
        as_read_back: dict[str, Any] = json.loads(json.dumps(listed))  # tuples become lists, at any depth
        return as_read_back

"""Options of a build: every choice that changes its bytes, checked before anything is read and listed in the manifest."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from data_prep.common.errors import BadInput
from data_prep.common.records import Corpus, ReadOptions
from data_prep.filters import rules
from data_prep.filters.classifiers import Classifier

if TYPE_CHECKING:
    from data_prep.text.clean import Form
    from megabert.data.tokenizer import Tokenizer

BLOCK_ROWS = 256
# least value of --max-sentence, tokens
SHORTEST_SENTENCE = 8
DEDUP = ("documents", "near", "paragraphs")
TRAINING = (
    *("vocab_size", "model_type", "lowercase", "sample_megabytes", "sample_alpha"),
    *("model_form", "character_coverage", "byte_fallback"),
)


@dataclass(frozen=True)
class CorpusOptions:
    """Options that a corpus may have of its own. `rules`: limits of quality rules by name."""

    read: ReadOptions
    rules: dict[str, float]
    language: Classifier | None = None


@dataclass(frozen=True)
class BuildOptions:
    """Options of `data_prep build` but its inputs, output and number of workers."""

    # tokens a row; a dataset each
    seq_lens: tuple[int, ...] = (128,)
    # sequences a row at most; 0 chooses by the corpus (shuffle.choose_slots)
    max_sequences: int = 0
    # sentence pairs; without, rows are filled with text
    nsp: bool = True
    # of pairs that aim at a shorter, uniform length
    short_share: float = 0.1
    # share of documents, by a hash of their words
    held_out: float = 0.01
    seed: int = 0
    normalization: Form = "NFC"
    # a model and its labels by which documents of other languages, or of poor quality, are dropped
    language: Classifier | None = None
    quality: Classifier | None = None
    # what is masked in texts, of clean.MASK_KINDS
    mask: tuple[str, ...] = ()
    # limits of quality rules by name
    rules: dict[str, float] = field(default_factory=dict)
    dedup: tuple[str, ...] = ("documents",)
    vocab_size: int = 30_000
    model_type: str = "unigram"
    # Unicode normal form in a SentencePiece model that is trained
    model_form: Form = "NFKC"
    # of the sample's characters; the rest is [UNK]
    character_coverage: float = 0.9995
    # tokens for bytes in place of [UNK]
    byte_fallback: bool = False
    # runs of spaces, tabs and line feeds become tokens, for code
    keep_whitespace: bool = False
    lowercase: bool = False
    # text that the tokenizer is trained on
    sample_megabytes: int = 20
    # a corpus' share of it grows with its bytes to this power
    sample_alpha: float = 1.0
    # tokens; longer sentences are split where pairs are made. 0: where much of a text is in far longer ones
    max_sentence: int = 0
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
            raise BadInput("--byte-fallback: WordPiece has no tokens for bytes; take --model-type unigram or bpe")

        if self.keep_whitespace and self.kind == "wordpiece":
            raise BadInput("--keep-whitespace: WordPiece forgets whitespace; take --model-type unigram or bpe")
        if self.keep_whitespace and {self.normalization, self.model_form} != {"none"}:
            raise BadInput("--keep-whitespace: takes --normalization none, which changes no character")

    def check_tokenizer(self, given: Tokenizer) -> None:
        """Raises BadInput where a tokenizer and these options treat whitespace differently."""
        if given.keeps_whitespace == self.keep_whitespace:
            return
        if self.keep_whitespace:
            why = "is WordPiece, which forgets" if given.kind == "wordpiece" else "was not trained to keep"
            raise BadInput(f"--keep-whitespace: {given.path} {why} whitespace; leave one of the two out")
        raise BadInput(f"--tokenizer {given.path}: keeps whitespace; give --keep-whitespace --normalization none")

    @property
    def kind(self) -> str:
        """The kind of the tokenizer that is trained, as `Tokenizer.kind`."""
        return "wordpiece" if self.model_type == "wordpiece" else "sentencepiece"

    def shared(self) -> CorpusOptions:
        """Options of a corpus that has none of its own."""
        return CorpusOptions(self.read, self.rules, self.language)

    def of(self, corpus: Corpus) -> CorpusOptions:
        """Options of a corpus: its own where it has some. Raises BadInput for an unknown filter."""
        limits = self.rules if corpus.filters is None else rules.parse(list(corpus.filters))
        language = self.language
        if corpus.languages is not None:
            if language is None:
                raise BadInput(f"corpus {corpus.name}: a language takes --language-model")
            language = replace(language, labels=corpus.languages)
        return CorpusOptions(corpus.read or self.read, limits, language)

    def listed(self, trained: bool) -> dict[str, Any]:
        """The options as manifests and build.json list them; without those of training where a tokenizer was given."""
        listed = asdict(self)
        if not trained:
            for name in TRAINING:
                listed.pop(name, None)
        as_json: dict[str, Any] = json.loads(json.dumps(listed))  # tuples become lists, at any depth
        return as_json

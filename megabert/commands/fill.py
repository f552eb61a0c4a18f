"""Words for the [MASK]s of a text, from a run's newest checkpoint, also while it trains, or from a Hugging Face folder.

megabert fill --model DIR "The capital of France is [MASK]."

A causal run fills in one [MASK], from the text before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megabert.common.arguments import MODEL, TOKENIZER, Parser, refuse_missing
from megabert.common.errors import command
from megabert.hf.hub import model_folder

if TYPE_CHECKING:
    from megabert.hf import Pretrained
    from megabert.model import BertForPreTraining

MASK = "[MASK]"
# for each mask the likeliest (word, probability)
Filled = list[list[tuple[str, float]]]


class Filler:
    """A model and its tokenizer; on the CPU, so that the GPU stays free for training."""

    def __init__(self, pretrained: Pretrained, module: BertForPreTraining | None = None) -> None:
        """`module`: the model in memory, if it is. Raises ValueError for a Hugging Face folder without a masked-LM head."""
        import torch

        pretrained.refuse_without_mlm_head()
        self.config, self.tokenizer = pretrained.config, pretrained.tokenizer
        self.model = module or pretrained.model(torch.device("cpu"))

    def fill(self, text: str, top: int = 5) -> Filled:
        """The `top` likeliest tokens for every [MASK], or the tokenizer's own name for it. Raises ValueError without a mask, with more
        than one for a causal model (which was never trained on [MASK]), or for too long a text."""
        if not isinstance(top, int) or top < 1:
            raise ValueError(f"top={top!r}: must be 1 or more")
        own = self.tokenizer.tokens[self.tokenizer.mask_id]
        if MASK not in text and own not in text:
            raise ValueError(f"the text has no {MASK}{f' or {own}' * (own != MASK)}; put one where a word is wanted")
        import torch

        from megabert.hf.packing import pack
        from megabert.hf.tokenizer_export import pad_encoded
        from megabert.hf.unknown_tokens import UnknownTokens
        from megabert.model import evaluating

        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("the text is not valid UTF-8; type it in a UTF-8 terminal")
        ids = pad_encoded(self.tokenizer, text)[0].numpy()
        UnknownTokens(self.tokenizer).add([ids]).warn("the text")
        most, causal = self.config.model.max_positions, self.config.data.masking.causal
        masks = torch.from_numpy((ids == self.tokenizer.mask_id).nonzero()[0])
        if len(ids) > most:
            raise ValueError(f"the text has {len(ids)} tokens, the model takes at most {most}; shorten it")
        if causal and len(masks) > 1:
            raise ValueError(f"the run is causal and fills in one {MASK}, not {len(masks)}")
        with evaluating(self.model):
            # a causal model predicts the mask from the token before it
            hidden = self.model.encode(**pack([ids], [len(ids)], causal=causal).inputs(), keep=masks - int(causal))
            best = self.model.mlm_logits(hidden).softmax(-1).topk(min(top, self.tokenizer.vocab_size))
        return [
            [(self._word(i), p) for i, p in zip(ids, probabilities, strict=True)]
            for ids, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _word(self, i: int) -> str:
        """The displayed form of a token: letters that continue the word before them begin with ##."""
        tokenizer = self.tokenizer
        shown, whole = tokenizer.tokens[i], tokenizer.word_start[i] or i in tokenizer.special_ids.values()
        shown = shown.removeprefix(" ") if whole else f"##{shown}" if shown[:1].isalnum() else shown
        return shown if shown.isprintable() and shown else ascii(shown)


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=MODEL)
    add("--top", type=int, default=5, metavar="K", help="words for each mask")
    add("--tokenizer", default="", metavar="FILE", help=TOKENIZER)
    add("text", help=f"text with {MASK}")
    args = parser.parse_args(argv)
    if args.top < 1:
        raise ValueError(f"--top {args.top}: must be 1 or more")
    refuse_missing(args, "tokenizer")
    folder = model_folder(args.model)
    from megabert import hf

    for words in Filler(hf.load(folder, args.tokenizer)).fill(args.text, args.top):
        print(f"{MASK}  " + "  ".join(f"{word} {p:.1%}" for word, p in words))

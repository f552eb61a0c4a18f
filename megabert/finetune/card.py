"""Model card of an exported fine-tuned model: what it was trained for, how its outputs are read, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megabert.finetune import huggingface, onnx
from megabert.finetune.save import Described, Finetuned
from megabert.hf.model_card import table

TASKS = {  # the hub's names; of the rest: TEXTS
    "tag": "token-classification",
    "span": "question-answering",
    "choose": "multiple-choice",
}
TEXTS = "text-classification"
CLASSIFY = """```python
from transformers import pipeline
print(pipeline("text-classification", "{name}")({text}, truncation=True, top_k=None))
```"""
TAG = """```python
from transformers import pipeline
tag = pipeline("token-classification", "{name}", aggregation_strategy="none", ignore_labels=[])
words = ["The", "words", "of", "one", "sentence"]
starts, at = [], 0  # where each word begins in the sentence that the pipeline joins
for word in words:
    starts.append(at)
    at += len(word) + 1
(found,) = tag(words, is_split_into_words=True)
first = {{piece["start"]: piece["entity"] for piece in reversed(found)}}
print([first[start] for start in starts])
```"""
SPAN = """```python
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForQuestionAnswering.from_pretrained("{name}").eval()
question, context = "Where is the Eiffel Tower?", "The Eiffel Tower is in Paris."
made = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
offsets, segments = made.pop("offset_mapping")[0].tolist(), made.sequence_ids(0)
with torch.no_grad():
    out = model(**made)
start, end = out.start_logits[0], out.end_logits[0]
tokens = [i for i, segment in enumerate(segments) if segment == 1]
best = max(((i, j) for i in tokens for j in tokens if i <= j < i + 30), key=lambda s: start[s[0]] + end[s[1]])
print(context[offsets[best[0]][0] : offsets[best[1]][1]])
```"""
CHOOSE = """```python
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForMultipleChoice.from_pretrained("{name}").eval()
text, choices = "She opens the door.", ["She walks in.", "She swims."]
made = tokenizer([text] * len(choices), choices, return_tensors="pt", padding=True, truncation=True)
with torch.no_grad():
    logits = model(**{{key: value[None] for key, value in made.items()}}).logits[0]
print(choices[int(logits.argmax())])
```"""
SEVERAL = """## Reading the labels

Each label has a probability of its own; a text has those above 0.5."""
ORDER = """## Reading the label

Output `above X` is the probability that the label is more than X. The label is the first X for which that is not above 0.5, the
last label where all are."""
RANK = """## Reading the score

The score is a number without a scale: of two texts{to} the better one has the higher score."""
WORDS = """## Which piece of a word has its tag

Words were given one by one, as in CoNLL's files, and each was cut into pieces on its own. A word's tag is the tag of its
first piece; what the model says of the pieces after it means nothing, it was never trained there. So give the pipeline words
(`is_split_into_words=True`) and take the first piece of each, as above. `aggregation_strategy="first"` on plain text does
the same where a word is what lies between spaces; punctuation inside a word ("U.S.") it takes for words of their own. With a
SentencePiece vocabulary, a first piece of a non-ASCII word that is only a space is passed over, and words of a script
without spaces were trained without the space that the tokenizer puts before them. Sentences of more than {max_length} tokens
were read in windows, each {stride} tokens after the one before, and a word's tag is that of the window where it is not at the
edge; the pipeline cuts them, or reads windows of its own with `stride`."""
ANSWERS = """## Reading an answer

Position 0, [CLS], stands for "no answer". A context that does not fit is read in windows of {max_length} tokens, each
{stride} after the one before ({stride_ours}), questions cut to 64 tokens. An answer has 30 tokens at most; its score
is the sum of its start's and its end's logit, the best of all windows wins."""
UNANSWERABLE = """ The probability that there is no answer is that of the smallest [CLS] sum of the windows against the
best answer, 1 / (1 + exp(best - null)); above 0.5 the answer is empty."""


def render(found: Finetuned, name: str, written: onnx.Written | None) -> str:
    """The README.md of an exported fine-tuned model; `written` is its ONNX export, where there is one."""
    described, kind = found.described, found.described.task.kind
    task = TASKS.get(kind, TEXTS)
    example = {"tag": TAG, "span": SPAN, "choose": CHOOSE}.get(kind, CLASSIFY)
    two = described.task.pair or (kind == "rank" and described.task.text)
    text = '{"text": "A text.", "text_pair": "Its second."}' if two else '["A text."]'
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- bert\n- megabert\n---",
        f"# {name}",
        f"A BERT fine-tuned with MegaBERT on `{described.task.name}`; it is transformers' "
        f"`{huggingface.architecture(described)}`.",
        example.format(name=name, text=text),
        "## Task",
        table(_task(described)),
        *_rules(described),
        "## Recipe",
        table(_recipe(found)),
        "## Figures",
        table(_figures(found)),
    ]
    if written is not None:
        parts += ["## ONNX", _onnx(written)]
    return "\n\n".join(parts) + "\n"


def _task(described: Described) -> dict[str, Any]:
    rows: dict[str, Any] = {"kind": described.task.kind}
    if described.labels:
        rows["labels"] = ", ".join(f"`{label}`" for label in described.labels)
    long = {
        "truncate": "cut (`truncation=True`)",
        "pool": "read in windows, whose logits are averaged; a pipeline cuts them",
    }
    if described.task.pair:
        long["truncate"] = (
            "cut, the longer one first (`truncation=True`; where both are longer than half, transformers may keep one "
            "token more of the second and one less of the first)"
        )
    rows["tokens of a text or window"] = described.max_length
    if described.task.kind not in TASKS:
        rows["longer texts"] = long[str(described.long)]
    return rows


def _rules(described: Described) -> list[str]:
    if described.task.kind == "tag":
        return [WORDS.format(max_length=described.max_length, stride=described.stride)]
    if described.task.kind == "multilabel":
        return [SEVERAL]
    if described.task.kind == "ordinal":
        return [ORDER]
    if described.task.kind == "rank":
        return [RANK.format(to=" (`text_pair`) for one `text`" if described.task.text else "")]
    if described.task.kind == "span":
        ours = f"`--max-length {described.max_length} --stride {described.stride}`"
        text = ANSWERS.format(max_length=described.max_length, stride=described.stride, stride_ours=ours)
        return [text + UNANSWERABLE * described.task.unanswerable]
    return []


def _recipe(found: Finetuned) -> dict[str, Any]:
    settings = found.results.get("settings", {})
    shown = ("lr", "batch", "epochs", "dropout", "warmup", "weight_decay", "seed", "precision", "freeze")
    rows: dict[str, Any] = {name.replace("_", " "): settings[name] for name in shown if name in settings}
    model = found.described.config.model
    rows["layers, width, heads"] = f"{model.layers}, {model.hidden}, {model.heads}"
    rows["tokenizer SHA-256"] = found.tokenizer.sha256
    return rows


def _figures(found: Finetuned) -> dict[str, Any]:
    dev: Mapping[str, float] = found.results.get("dev", {})
    rows = {f"{name}, on the file that chose these weights": f"{value:.4f}" for name, value in dev.items()}
    return rows or {"figures": "not measured"}


def _onnx(written: onnx.Written) -> str:
    place = onnx.FOLDER
    text = (
        f"`{place}/{onnx.WHOLE}`: fp32, its logits in onnxruntime within {written.difference:.1e} of the model's, on full, "
        "padded and single sequences."
    )
    if not written.scores_int8:
        return text
    rows = ["| | fp32 | int8 | loss |", "|---|---|---|---|"]
    for name, whole in written.scores.items():
        other = written.scores_int8[name]
        rows.append(f"| {name} | {whole:.4f} | {other:.4f} | {whole - other:+.4f} |")
    return (
        f"{text} `{place}/{onnx.QUANTISED}`: weights of the products in 8 bits, activations quantised as they come; what "
        "that loses, on the labelled file that was named at export:\n\n" + "\n".join(rows)
    )

"""A trained model in Python: words, vectors, logits, and its loss on a batch of a dataset.

python examples/python_api.py runs/mini data/seq128
"""

import sys

import torch

import megabert

model = megabert.load(sys.argv[1])  # a run, a checkpoint, a Hugging Face folder, or a name on the hub
print(model.fill("The capital of France is [MASK].", top=3))
print(model.encode(["one text", "another"]).shape)

ids = model.tokenizer(["the first [MASK]", "and the second text"])  # int32 [2, T]
with torch.no_grad():  # without it they have gradients
    print(model.model(ids).shape, model.logits(ids).equal(model.model(ids)))  # [2, T, V]

dataset = megabert.Dataset(sys.argv[2])
stored = next(iter(torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)))  # type: ignore[arg-type]
print(f"{len(dataset):,} rows:", {name: list(values.shape) for name, values in stored.items()})
batch = next(megabert.batches(dataset, rows=4))  # masked
with torch.no_grad():
    print(f"loss {float(model.model(**batch.inputs()).mlm_loss_sum) / batch.predictions:.2f}")

"""Search in the corpus a model was pre-trained on: passages of its shards, their vectors, the nearest to a query.

python examples/search_corpus.py index data/seq128 runs/vectors/model corpus.npz
python examples/search_corpus.py search corpus.npz runs/vectors/model "Which rivers flow north?"

The model is a sentence-transformers folder, as `examples/train_sentence_vectors.py` leaves it. A passage is what a sequence of the
shards holds of one document. The index is flat: every vector is compared, by FAISS where that is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megabert import hf as pretrained
from megabert.commands.extraction import Extractor
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.hf import sentence_folder

AT_ONCE = 4096  # rows read
SHORTEST = 16  # tokens of a passage
RESULTS = 5


def passages(folder: str) -> Iterator[str]:
    """Each text once: a sequence's two parts where the second one follows the first, else the first alone."""
    dataset = Dataset(folder)
    tokenizer, seen = Tokenizer.load(dataset.tokenizer_path), set()
    for first in range(0, dataset.rows, AT_ONCE):
        rows = dataset.read(np.arange(first, min(first + AT_ONCE, dataset.rows)))
        for ids, bounds, follows in zip(rows.ids, rows.bounds.tolist(), rows.isnext, strict=True):
            start = 0
            for (length, first_part), next_one in zip(bounds, follows, strict=True):
                kept = length if next_one == 1 else first_part
                text = tokenizer.decode(ids[start : start + kept]).strip()
                start += length
                if kept >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield text


def extractor(model: str) -> Extractor:
    """The model, pooling as its folder says."""
    how = sentence_folder.read(model)
    return Extractor(pretrained.load(model), pool=how.pool, max_length=how.max_length, normalise=True)


def vectors(texts: list[str], model: str) -> np.ndarray:
    """fp32 [n, D] of length 1."""
    parts = extractor(model).parts((text, None) for text in texts)
    return np.concatenate([part.vectors for part in parts])


def index(dataset: str, model: str, file: str) -> None:
    """Write the texts and their vectors."""
    texts = list(passages(dataset))
    listed = json.dumps(texts, ensure_ascii=False).encode()  # an array of texts would be as wide as the longest
    with Path(file).open("wb") as out:
        np.savez(out, texts=np.frombuffer(listed, np.uint8), vectors=vectors(texts, model))
    print(f"{file}: {len(texts):,} passages")


def nearest(queries: np.ndarray, corpus: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines fp32 [q, count] and places int64 [q, count] of the nearest vectors, the nearest first."""
    try:
        import faiss
    except ImportError:
        cosines = queries @ corpus.T
        places = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
        return np.take_along_axis(cosines, places, 1), places
    flat = faiss.IndexFlatIP(corpus.shape[1])
    flat.add(corpus)
    return flat.search(queries, count)


def search(file: str, model: str, *queries: str) -> None:
    """Print what is nearest to each query."""
    with np.load(file) as stored:
        texts, corpus = json.loads(stored["texts"].tobytes()), stored["vectors"]
    cosines, places = nearest(vectors(list(queries), model), corpus, min(RESULTS, len(texts)))
    for query, near, found in zip(queries, cosines, places, strict=True):
        print(query)
        for cosine, place in zip(near, found, strict=True):
            print(f"  {cosine:.3f}  {texts[place]}")


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "index":
        index(*words)
    else:
        search(*words)

"""Embeddings of texts: an encoder fine-tuned so that the vectors of texts that belong together are near each other.

pairs     what is learned from and judged by: pairs, texts alone, pairs with a score
batches   which pairs an update holds
model     pooling, the contrastive loss, negatives of all ranks
metrics   retrieval and similarity
training  a run, and what it leaves: a sentence-transformers folder
"""

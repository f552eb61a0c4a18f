"""Fixed features: a trained model's vectors of texts, as in Devlin et al. 2019, section 5.3.

extraction  layers, pooling, batches: texts in, vectors out, in their order and the same whatever the batches
texts       files of texts
writers     files of vectors
compare     one word in several contexts
"""

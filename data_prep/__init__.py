"""Raw text to verified shards, the same bytes whatever the number of processes.

The input alone decides how work is cut (`readers.tasks`), randomness comes from (seed, unit) and never from a
worker, memory is bounded by the size of a unit and of a shuffle bucket, and the manifest is written last.
"""

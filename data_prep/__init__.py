"""Raw text to verified shards, with the same bytes for any number of processes.

The division of work depends only on the input (`readers.tasks`), random numbers only on (seed, unit). Memory is bounded by the
size of a unit and of a shuffle bucket, and the manifest is written last.
"""

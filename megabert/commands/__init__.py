"""The commands `megabert NAME` other than `train`. Slow imports are inside functions, so that `--help` is fast."""

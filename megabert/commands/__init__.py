"""The commands `megabert NAME` other than `train`. Slow imports stand in functions, so that `--help` answers at once."""

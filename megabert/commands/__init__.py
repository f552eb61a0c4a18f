"""The commands `megabert NAME` other than `train`."""

"""Optimizers that stay what they are under ZeRO, and learning-rate schedules: a file a rule, `build` above them."""

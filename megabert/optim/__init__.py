"""Optimizers whose updates are the same under every ZeRO stage, and learning-rate schedules: a file for each rule, and `build`."""

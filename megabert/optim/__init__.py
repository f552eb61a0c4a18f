"""Optimizers that stay what they are under ZeRO, and learning-rate schedules."""

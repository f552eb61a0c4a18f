"""Ranks of a command: process group, session, watchdog, keeper and its rank, signals and time limits, run lock, preflight.

Import the modules themselves: `signals`, `keeper` and `kept_rank` must not import torch.
"""

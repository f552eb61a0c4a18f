"""Ranks of a command: process group, session, watchdog, keeper, signals and time limits, run lock, preflight.

Import the modules themselves: `signals` and `keeper` must not import torch.
"""

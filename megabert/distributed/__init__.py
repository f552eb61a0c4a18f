"""Ranks of a command: process group, session, watchdog, signals and time limits.

Import the modules themselves: `signals` must not import torch.
"""

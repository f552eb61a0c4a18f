"""Restarts of ranks within a job (`train --in-place`): the keeper of a rank, the rank that it keeps, and copies of training state in
memory.

Import the modules themselves: `keeper` and `kept_rank` must not import torch.
"""

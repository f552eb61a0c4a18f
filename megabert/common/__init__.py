"""Tools for all other folders: atomic files, tables, errors, messages, environment, random numbers.

They import nothing else of this project. This file stays empty, because most of them must not import torch.
"""

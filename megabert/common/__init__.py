"""Tools for every other folder: atomic files, tables, errors, messages, environment, random numbers.

They import nothing of this project. This file stays empty, because most of them must import without torch.
"""

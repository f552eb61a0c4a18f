"""Tools for all other folders: atomic files, tables, errors, messages, environment, random numbers.

They import nothing else from this project. This file re-exports nothing, because most modules here must not import
torch.
"""

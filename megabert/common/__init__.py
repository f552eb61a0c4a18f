"""Small tools that every other folder may use: whole files, sealed JSON, tables, messages, environment, random seeds.

They import nothing of this project. This file stays empty, because most of them must come without torch.
"""

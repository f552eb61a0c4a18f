"""Whole benchmarks: every task of a folder over seeds and a grid, to one table and the files that are handed in.

suites      which tasks there are, where their files lie, how the literature fine-tunes on them
splits      what decides and what is reported: two different sets of examples, unless it is asked for otherwise
evaluation  a finished run's reported scores and its predictions of unlabelled files
summary     means, deviations and intervals over seeds; the tables
published   scores of published models, each with its source
submission  the files in the form that a benchmark's site takes
"""

"""Execution of a build: worker pools, the journal of finished work, work files, the output folder."""

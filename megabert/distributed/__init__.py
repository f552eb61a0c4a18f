"""Ranks: the process group, the watchdog over them, the lock of a run folder, signals and time limits."""

"""Ranks of a command: the process group (ranks), a session of it, the watchdog over it, signals and time limits, the lock of a
run folder, the preflight of a cluster. Its modules are its face: `signals` is imported before torch is."""

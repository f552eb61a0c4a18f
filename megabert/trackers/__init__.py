"""Trackers beside a run's own files: TensorBoard, Weights & Biases, MLflow, Trackio. Each is made with the run folder, the configuration,
the step from which the run resumes (-1: a new one), and the project that the configuration names; after a rollback it is closed and made
again.
"""

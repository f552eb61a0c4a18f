"""Names of the files in a run folder, beside `checkpoints/`."""

CONFIG = "config.json"
# one JSON object a line: a logged step, an evaluation's samples, a start, an update that was skipped or whose loss jumped
METRICS, SAMPLES, STARTS, TROUBLE = "metrics.jsonl", "samples.jsonl", "starts.jsonl", "trouble.jsonl"
# the id under which Weights & Biases knows the run
SINK_IDS = "sinks.json"

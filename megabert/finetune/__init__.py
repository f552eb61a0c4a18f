"""Fine-tuning: a pre-trained encoder and one added layer, for tasks that classify, score, tag or find a span."""

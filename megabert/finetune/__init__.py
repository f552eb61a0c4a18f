"""Fine-tuning: one pre-trained encoder, one added layer, any task that classifies, scores, tags or finds a span."""

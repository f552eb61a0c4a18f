"""What people read of a dataset: summary, inspection, verification."""

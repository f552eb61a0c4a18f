"""What people read of a dataset: summary, HTML report, inspection, verification."""

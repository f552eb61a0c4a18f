"""Reports about a dataset: summary, inspection, verification."""

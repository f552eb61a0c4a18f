"""Records, errors and hashes, shared by all of data_prep."""

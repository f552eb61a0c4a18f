"""Records, errors and hashes that all of data_prep shares."""

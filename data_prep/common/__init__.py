"""Records, errors, hashes and the hash table of words that all of data_prep shares."""

"""The stages of a build (`data_prep.pipeline` has their order)."""

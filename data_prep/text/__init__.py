"""Text of a document: cleaning, sentences, MinHash."""

"""Text of a document: cleaning and sentence ends."""

"""Quality filters of documents."""

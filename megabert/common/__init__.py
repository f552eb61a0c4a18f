"""Small tools that every other package may use; they import nothing of this project."""

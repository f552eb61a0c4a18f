"""From text to a trained and evaluated model on one machine, in one command."""

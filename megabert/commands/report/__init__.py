"""Report of runs as one HTML file: reading a run's folder, drawing its curves, writing the page."""

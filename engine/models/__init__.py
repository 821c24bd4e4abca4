"""Models: names to files, files to packed weights, and the one decoder."""

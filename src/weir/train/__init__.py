"""Training the packaged model: corpus, exercises and the loop."""

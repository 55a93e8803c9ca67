"""Scores from the literature by which a pool keeps tokens, one per file."""

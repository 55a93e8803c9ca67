"""Scores of the field, by which a pool keeps tokens: one a file."""

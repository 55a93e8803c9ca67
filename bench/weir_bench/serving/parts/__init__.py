"""Measurements of a server, one part a file."""

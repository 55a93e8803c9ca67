"""Measurements: what policies do to what a model knows."""

"""Measures how policies affect what a model still knows."""

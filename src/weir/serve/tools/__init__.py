"""Calls of a client's functions: how models write them, and how they are constrained and parsed."""

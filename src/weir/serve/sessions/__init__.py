"""Saved sessions: checkpoints and records of turns, responses and exports."""

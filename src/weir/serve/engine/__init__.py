"""The engine: run sequences of many sessions through one model, in rows that are allocated once."""

"""The engine: sequences of many sessions through one model, in rows allocated once."""

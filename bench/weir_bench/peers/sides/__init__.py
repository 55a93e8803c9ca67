"""The peers' sides: scripts that run in environments of their own, without weir."""

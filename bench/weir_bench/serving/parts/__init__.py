"""The parts of `weir bench serve`, one in each file."""

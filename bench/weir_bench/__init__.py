"""`weir bench`: figures of speed and memory, each beside a peer, timed in turns in one run."""

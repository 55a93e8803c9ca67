"""`weir bench`: measure speed and memory of weir and other libraries, in turns, in one run."""

"""`weir bench serve`: figures of a server under load, as its clients see it."""

"""`weir bench serve`: measure a server under load from the clients' side."""

"""What is measured of a server, a file a part."""

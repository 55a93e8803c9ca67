"""Each figure of `weir bench`, a file each; to import them registers them."""

"""The figures of `weir bench`, which are registered when their files are imported."""

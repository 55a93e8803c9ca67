"""The tasks, one file each; importing this makes all of them known."""

"""`python -m weir`: the command `weir`, of this Python."""

from weir.cli import main

if __name__ == "__main__":
    main()

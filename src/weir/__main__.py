"""Run the command `weir` with this Python: `python -m weir`."""

from weir.cli import main

if __name__ == "__main__":
    main()

"""Run the command `weir` with this Python: `python -m weir`."""

from weir.cli import run_program

if __name__ == "__main__":
    run_program()

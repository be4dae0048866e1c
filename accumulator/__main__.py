"""`python -m accumulator`: the same as the program `accumulator`."""

from accumulator.cli import main

if __name__ == "__main__":
    main()

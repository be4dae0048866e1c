"""Closes windows that are due."""

import sys

from workers import start

if __name__ == "__main__":
    sys.exit(start("closer"))

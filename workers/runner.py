"""Runs the handlers of flows with the sink `direct`."""

import sys

from workers import start

if __name__ == "__main__":
    sys.exit(start("runner"))

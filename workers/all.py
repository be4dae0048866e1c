"""All roles in one process."""

import sys

from workers import start

if __name__ == "__main__":
    sys.exit(start())

"""Makes RQ jobs of closed windows."""

import sys

from workers import start

if __name__ == "__main__":
    sys.exit(start("dispatcher"))

"""Records what nobody was handed, so that its payloads may go."""

import sys

from workers import start

if __name__ == "__main__":
    sys.exit(start("janitor"))

"""All roles in one process."""

import sys

from accumulator.worker import ROLES
from workers import start

if __name__ == "__main__":
    sys.exit(start(*ROLES))

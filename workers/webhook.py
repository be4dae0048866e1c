"""Posts the manifests of flows with the sink `webhook`."""

import sys

from workers import start

if __name__ == "__main__":
    sys.exit(start("webhook"))

"""An event accumulator on Redis."""

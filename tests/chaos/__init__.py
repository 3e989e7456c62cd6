"""Long runs in which something is killed, again and again. Not part of ``make test``."""

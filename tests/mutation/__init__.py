"""How much of what the pure files say the unit tests notice: ``make mutation``."""

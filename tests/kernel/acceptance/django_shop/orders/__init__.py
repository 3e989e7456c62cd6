"""Orders, and reminders of them."""

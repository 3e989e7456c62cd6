"""What a user sees: a Django project with its own commands, a real broker and a real database."""

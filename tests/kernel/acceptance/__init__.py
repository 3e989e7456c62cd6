"""Whole setups: workers and brokers that are killed, and a Django project."""

"""What runs inside ``celery worker`` processes."""

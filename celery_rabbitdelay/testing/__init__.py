"""What tests of delayed tasks need: private RabbitMQ and Redis servers."""

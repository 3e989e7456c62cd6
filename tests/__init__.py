"""The tests, in folders by what they need: nothing, a broker, or whole nodes."""

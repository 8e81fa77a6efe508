"""What an operator can tune: validated once, frozen, and the only reader of the environment."""

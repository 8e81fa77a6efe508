"""The progress engine: which sends are pending, and how they are made to move without blocking."""

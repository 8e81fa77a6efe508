"""The model-free ring: what a hop costs, and what the settings of the drive do."""

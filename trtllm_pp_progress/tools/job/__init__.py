"""What every tool needs: start ranks under a launcher, describe the machine, write the result."""

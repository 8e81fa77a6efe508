"""A door in each patched process: who may knocks at a Unix socket, and is answered in JSON."""

"""The ways in: install and uninstall, status, the command `run`, and what they do at exit and in a forked child."""

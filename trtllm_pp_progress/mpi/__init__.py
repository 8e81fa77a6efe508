"""The one place that knows MPI's state in this process, when it ends, and how many cores its ranks share."""

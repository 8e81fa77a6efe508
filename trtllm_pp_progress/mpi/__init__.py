"""The one place that knows MPI's state in this process, and when it ends."""

"""The bench: every relay policy in every scenario, interleaved, in one run. Needs mpi4py."""

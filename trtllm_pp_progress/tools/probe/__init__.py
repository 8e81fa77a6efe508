"""The probe: does a send progress on this cluster while its sender is outside MPI? Needs mpi4py.

Exit codes: 0 every send moves, 1 some park (the patch is for you), 2 it cannot be told.
"""

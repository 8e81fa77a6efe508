"""Who enters MPI while the Python threads cannot: a native thread that needs no GIL."""

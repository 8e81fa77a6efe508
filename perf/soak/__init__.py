"""Lives of executors, one after the other: nothing may hang, be wrong, or be left behind."""

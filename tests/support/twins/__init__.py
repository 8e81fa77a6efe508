"""Twins: one situation, lived through without the patch and with it, from the same code, and what differed.

`cells` lists the situations, `job` runs one of them, `verdict` compares. `warden` and `life` run on the ranks.
"""

"""Faults between hosts: what becomes of the ring, and how it ends."""

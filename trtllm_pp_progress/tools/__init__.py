"""What people run: bench, probe, doctor and watch, the host executor they measure with, and the jobs they start."""

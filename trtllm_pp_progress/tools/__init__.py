"""What people run: bench, probe and doctor, the host executor they measure with, and the jobs they start."""

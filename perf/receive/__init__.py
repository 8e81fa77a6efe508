"""vLLM's sampled-result receives: measured on GPUs and CPUs, modelled, and read out of traces."""

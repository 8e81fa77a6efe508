"""Upstream's PP4 Qwen3 case on what the machine offers: the id, the engines, the evidence and the verdict.

`case` reads the id, `engines` chooses, `loop` is PyExecutor's iteration, `model`, `links` and `stage` are a pipeline
stage on a CPU or a GPU, `measure` runs one relay, `evidence` and `figure` show where a step's time went, `verdict` is
the threshold. perf/README.md has commands and figures.
"""

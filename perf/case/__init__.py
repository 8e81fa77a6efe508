"""Upstream's PP4 Qwen3 case on what the machine offers: the id, the engines, the evidence and the verdict.

`command` is the command line and `rank` what a rank does with it; `ids` reads the id, `engines` chooses, `loop` is
PyExecutor's iteration, `model`, `links` and `stage` are a pipeline stage on a CPU or a GPU, `measure` runs one relay,
`evidence`, `figure` and `perfetto` show where a step's time went, `judge` holds them against the threshold.
"""

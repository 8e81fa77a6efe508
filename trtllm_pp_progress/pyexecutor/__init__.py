"""What TensorRT-LLM's PyExecutor looks like, era by era, and what is grafted onto it."""

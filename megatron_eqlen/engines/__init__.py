"""vLLM as the engine: in the training process (``colocated``), or as servers on other nodes (``client``).

Nothing here is imported before it is used: vLLM takes longer to import than all the rest together.
"""

"""vLLM as the engine: in the training process (``colocated``) or as servers on other nodes (``servers``).

Nothing here is imported before use: vLLM takes longer to import than all the rest together.
"""

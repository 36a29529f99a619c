"""Resources that a recipe needs, computed without a GPU: memory by phase, host, disk, time."""

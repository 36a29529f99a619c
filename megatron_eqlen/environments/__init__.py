"""Environments that answer the turns of a response: tools, games, databases."""

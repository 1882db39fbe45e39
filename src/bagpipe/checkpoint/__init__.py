"""Checkpoints: the whole state of a run as files that are complete and verified, or invisible (I6).

Whoever only writes or reads rows, such as an embedding server, needs no PyTorch: `tree` and `convert` alone import it.
"""

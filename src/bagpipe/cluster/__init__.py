"""All roles of a run as Ray actors: started, watched and ended together. Nothing else in Bagpipe knows Ray.

Control goes through Ray: where a role runs, its address, how it is, that it ends. Rows, plans and batches never do.
"""

"""Attention across ranks that share a sequence: each holds a slice of the queries and a slice of the keys and values.

`ranks` is who they are and how they talk, `sharded` a call of which a rank holds a part, `ring` its execution by partial states.
"""

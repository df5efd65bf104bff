"""The two forms a score reduces to, the call that holds one attention, and the executions of it."""

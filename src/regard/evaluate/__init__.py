"""Metrics: of what a task model answers, and of where its attention looks."""

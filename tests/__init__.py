"""Tests of regard, path by path as in `src/regard`."""

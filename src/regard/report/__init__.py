"""What is shown: figures for papers and reports. Everything else computes; only this package draws."""

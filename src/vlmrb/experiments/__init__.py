"""Comparisons over schemes and seeds, and the demo."""

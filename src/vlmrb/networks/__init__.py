"""Encoders and heads."""

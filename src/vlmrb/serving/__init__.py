"""Scoring over the network: the wire format, the client side of it, and the server."""

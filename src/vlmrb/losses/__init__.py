"""Losses: what TorchRL lacks, or has only at a price that small networks cannot pay."""

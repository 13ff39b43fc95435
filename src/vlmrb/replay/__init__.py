"""The replay buffer: priority terms, mixture sampling, clips and their scores."""

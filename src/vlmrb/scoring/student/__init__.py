"""A small network that learns, while training goes on, to foresee what the scorer would say."""

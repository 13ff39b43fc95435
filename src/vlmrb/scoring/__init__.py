"""From finished clips to scores: what a scorer is, who asks it, and when.

`clips` holds what a scorer sees, `scorer` what it must answer; `service` asks it without making the learner wait,
through one of the back-ends in `backends` and `process`. What a scoring process imports is nothing heavier than NumPy.
"""

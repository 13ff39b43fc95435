"""The offline check: does a scorer, with this prompt and threshold, understand a task, before a run is paid for?"""

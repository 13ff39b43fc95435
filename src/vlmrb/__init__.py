"""VLM-guided experience replay: a vision-language model tells the replay buffer which experience matters.

Importing this package loads nothing heavy; torch comes in with the submodule that needs it.
"""

from importlib.metadata import version

__version__ = version("vlmrb")

"""What scorers that ask vision-language models are made of.

`answers` reads yes and no off a model's next token; `chat`, `paths` and `families` show it clips; `pixels`,
`unique_frames` and `vision_cache` do so quickly; `loading` and `memory` get it ready.
"""

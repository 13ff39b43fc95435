"""Rules as a priority: what experience should look like, said in predicates of transitions (docs/replay/rules.md)."""

"""Tests which families of models a push serves on a real vLLM: `python -m instep.bench.models`.

Read `one.py` first: it is what is done with each family. `families` has their configurations, with
tiny sizes; `matrix.py` runs them in processes of their own; `page.py` writes `docs/models.md`.
"""

"""Trainers of other projects that push with instep after two lines, with no change of their code.

`trl`: trainers of TRL that generate with vLLM.
"""
